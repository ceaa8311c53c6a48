"""Changes of one block's weights that are applied when the block runs; what is stored stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ..quant import dequantize
from ..quant.weight import StoredWeight
from .adapter import LowRank

_FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class BlockPatches:
    """The changes of one block.

    Args:
        low_rank: LoRAs by the name of their linear: `self_attn.q`, `ffn.0` ...
        differences: (strength, difference) by the name of the tensor: `ffn.0.bias`, `modulation` ...
    """

    low_rank: dict[str, list[LowRank]] = field(default_factory=dict[str, list[LowRank]])
    differences: dict[str, list[tuple[float, torch.Tensor]]] = field(
        default_factory=dict[str, list[tuple[float, torch.Tensor]]]
    )

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor, torch.dtype]]:
        """Every tensor under a name of its own, and the dtype that it is placed in for a computation in `dtype`.

        Matrices of LoRAs are placed in `dtype`, differences as they are, or in float32 from a float of another size.
        """
        for name, pairs in self.low_rank.items():
            for number, pair in enumerate(pairs):
                yield f"{name} {number} down", pair.down, dtype
                yield f"{name} {number} up", pair.up, dtype
        for name, changes in self.differences.items():
            for number, (_, difference) in enumerate(changes):
                wanted = difference.dtype if difference.dtype in _FORMATS else torch.float32
                yield f"{name} {number} difference", difference, wanted

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes that all tensors take where they are placed."""
        return sum(tensor.numel() * wanted.itemsize for _, tensor, wanted in self.tensors(dtype))

    def placed(self, tensor: Callable[[str], torch.Tensor]) -> BlockPatches:
        """The same changes over tensors that are elsewhere, by the names of `tensors`."""
        return BlockPatches(
            {
                name: [
                    LowRank(tensor(f"{name} {number} down"), tensor(f"{name} {number} up"), pair.scale)
                    for number, pair in enumerate(pairs)
                ]
                for name, pairs in self.low_rank.items()
            },
            {
                name: [
                    (strength, tensor(f"{name} {number} difference")) for number, (strength, _) in enumerate(changes)
                ]
                for name, changes in self.differences.items()
            },
        )

    def over(self, weights: Mapping[str, StoredWeight], dtype: torch.dtype) -> Mapping[str, StoredWeight]:
        """`weights` with the differences added to a tensor when it is asked for."""
        return PatchedWeights(weights, self, dtype) if self.differences else weights


class PatchedWeights(Mapping[str, StoredWeight]):
    """A block's weights with differences added in float32; matrices are then rounded once, to `dtype`.

    Memory: the float32 copy of one tensor at a time.
    """

    def __init__(self, weights: Mapping[str, StoredWeight], patches: BlockPatches, dtype: torch.dtype) -> None:
        self._weights, self._patches, self._dtype = weights, patches, dtype

    def __getitem__(self, name: str) -> StoredWeight:
        stored = self._weights[name]
        changes = self._patches.differences.get(name)
        if not changes:
            return stored
        total = dequantize(stored, torch.float32)
        if stored.format == "f32":  # then it is the stored tensor itself
            total = total.clone()
        for strength, difference in changes:
            total.add_(difference.to(total.device, total.dtype), alpha=strength)
        # The modulation table is used in float32.
        dtype = self._dtype if len(stored.shape) == 2 else torch.float32
        return StoredWeight(_FORMATS[dtype], stored.shape, total.to(dtype))

    def __contains__(self, name: object) -> bool:
        return name in self._weights

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
