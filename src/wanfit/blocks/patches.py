"""Changes of one block's weights that are applied when the block runs; what is stored stays as it is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
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

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes that `to(device, dtype)` takes on a device."""
        pairs = [pair for adapters in self.low_rank.values() for pair in adapters]
        matrices = sum(pair.down.numel() + pair.up.numel() for pair in pairs)
        differences = [difference for changes in self.differences.values() for _, difference in changes]
        return matrices * dtype.itemsize + sum(difference.nbytes for difference in differences)

    def to(self, device: torch.device, dtype: torch.dtype) -> BlockPatches:
        """The same changes on another device: LoRAs in `dtype`, differences as they are; nothing is copied twice."""
        return BlockPatches(
            {
                name: [dataclasses.replace(a, down=a.down.to(device, dtype), up=a.up.to(device, dtype)) for a in pairs]
                for name, pairs in self.low_rank.items()
            },
            {
                name: [(strength, difference.to(device)) for strength, difference in changes]
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
