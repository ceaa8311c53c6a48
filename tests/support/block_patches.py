"""Changes of a few blocks, as LoRAs and differences give them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from wanfit.blocks import BlockPatches, LowRank

SHAPES = {"self_attn.q": (48, 32), "ffn.0": (80, 48), "ffn.2": (48, 80)}


def some_patches(
    indices: tuple[int, ...] = (0, 1, 3, 4), dtype: torch.dtype = torch.bfloat16
) -> dict[int, BlockPatches]:
    """Of several ranks and dtypes, another number for each block; block 2 has none."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(kind)

    patches = {}
    for index in indices:
        names = list(SHAPES)[: 1 + index % 3]
        low_rank = {
            name: [
                LowRank(draw(rank, SHAPES[name][1]), draw(SHAPES[name][0], rank), 0.5 * rank) for rank in (3, 1 + index)
            ]
            for name in names
        }
        differences = {
            "ffn.0.bias": [(0.7, draw(80, kind=torch.float16))],
            "modulation": [(1.0, draw(1, 6, 48, kind=torch.float64)), (-0.3, draw(1, 6, 48))],
        }
        patches[index] = BlockPatches(low_rank, differences)
    return patches


def require_same(held: BlockPatches, given: BlockPatches, dtype: torch.dtype) -> None:
    """`held` has `given`'s tensors, in the dtypes in which they are placed, and its strengths."""
    expected = [(name, tensor.to(wanted)) for name, tensor, wanted in given.tensors(dtype)]
    actual = [(name, tensor.cpu()) for name, tensor, _ in held.tensors(dtype)]
    assert [name for name, _ in actual] == [name for name, _ in expected]
    for (name, tensor), (_, reference) in zip(actual, expected, strict=True):
        assert tensor.dtype == reference.dtype, name
        assert torch.equal(tensor, reference), name
    assert strengths(held) == strengths(given)


def strengths(patches: BlockPatches) -> tuple[list[float], list[float]]:
    scales = [pair.scale for pairs in patches.low_rank.values() for pair in pairs]
    return scales, [strength for changes in patches.differences.values() for strength, _ in changes]


def with_other_strengths(patches: Mapping[int, BlockPatches], factor: float) -> dict[int, BlockPatches]:
    """The same tensors."""
    return {
        index: BlockPatches(
            {k: [LowRank(p.down, p.up, p.scale * factor) for p in pairs] for k, pairs in block.low_rank.items()},
            {k: [(s * factor, t) for s, t in changes] for k, changes in block.differences.items()},
        )
        for index, block in patches.items()
    }
