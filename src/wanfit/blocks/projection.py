"""Linears of a block: the stored weight is read once and applied to all chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch

from ..errors import CheckpointError
from ..quant import dequantize, linear
from ..quant.weight import StoredWeight
from .adapter import LowRank

_FORMAT_OF = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class BlockWeights:
    """The weights of one block by their original names, given out in the compute dtype.

    Args:
        weights: as `WeightSource.onload` gives them.
        dtype: compute dtype.
        adapters: LoRAs by the name of their linear: `self_attn.q`, `ffn.0` ...
    """

    def __init__(
        self,
        weights: Mapping[str, StoredWeight],
        dtype: torch.dtype,
        adapters: Mapping[str, Sequence[LowRank]] | None = None,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._adapters = adapters or {}

    def _stored(self, name: str) -> StoredWeight:
        if name not in self._weights:
            raise CheckpointError("tensors_missing", "denoise", f"a transformer block has no {name!r}")
        return self._weights[name]

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return dequantize(self._stored(name), dtype or self._dtype)

    def projection(self, name: str) -> Projection:
        """The linear `name`, dequantised now; it holds that copy until it is dropped."""
        stored = self._stored(f"{name}.weight")
        ready = StoredWeight(_FORMAT_OF[self._dtype], stored.shape, dequantize(stored, self._dtype))
        return Projection(ready, self.tensor(f"{name}.bias"), self._adapters.get(name, ()))


@dataclasses.dataclass(frozen=True)
class Projection:
    weight: StoredWeight
    bias: torch.Tensor
    adapters: Sequence[LowRank] = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        output = linear(x, self.weight, self.bias)
        for adapter in self.adapters:
            adapter.add_to(output, x)
        return output
