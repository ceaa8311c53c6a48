"""Linears of a block: the stored weight is read once and applied to all chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from ..errors import CheckpointError
from ..quant import dequantize
from ..quant.float8_matmul import Float8LowRank, Float8Rows, matmul, quantize_low_rank, takes_float8
from ..quant.weight import StoredWeight
from .adapter import LowRank
from .product import Product


class BlockWeights:
    """The weights of one block by their original names, given out in the compute dtype.

    Args:
        weights: as `WeightSource.onload` gives them.
        dtype: compute dtype.
        adapters: LoRAs by the name of their linear: `self_attn.q`, `ffn.0` ...
        float8: multiply in float8 where the stored weight is one.
        rows: of the inputs of its linears, unless said otherwise.
    """

    def __init__(
        self,
        weights: Mapping[str, StoredWeight],
        dtype: torch.dtype,
        adapters: Mapping[str, Sequence[LowRank]] | None = None,
        *,
        float8: bool = False,
        rows: int = 1,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._adapters = adapters or {}
        self._float8 = float8 and dtype.itemsize == 2
        self._rows = rows

    def _stored(self, name: str) -> StoredWeight:
        if name not in self._weights:
            raise CheckpointError("tensors_missing", "denoise", f"a transformer block has no {name!r}")
        return self._weights[name]

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return dequantize(self._stored(name), dtype or self._dtype)

    def projections(self, *names: str, rows: int | None = None) -> tuple[Projection, ...]:
        """Linears of one input of `rows` rows: all of them read it in float8, or none does.

        Unless they multiply in float8 they are dequantised now, and hold that copy until they are dropped. A LoRA
        is then added into the copy where that is less work than beside each row.
        """
        stored = [self._stored(f"{name}.weight") for name in names]
        float8 = self._float8 and all(takes_float8(weight) for weight in stored)
        return tuple(
            self._projection(name, weight, float8, self._rows if rows is None else rows)
            for name, weight in zip(names, stored, strict=True)
        )

    def _projection(self, name: str, stored: StoredWeight, float8: bool, rows: int) -> Projection:
        adapters, bias = self._adapters.get(name, ()), self.tensor(f"{name}.bias")
        if float8:
            lora = _in_float8(adapters, self._dtype) if adapters else None
            return Projection(stored, bias, float8_lora=lora)
        matrix = dequantize(stored, self._dtype)
        if not adapters or not _merging_is_less(matrix, rows):
            return Projection(matrix, bias, adapters)
        own = matrix.data_ptr() != stored.data.data_ptr()
        for adapter in adapters:
            matrix = adapter.merged_into(matrix, in_place=own)
            own = True
        return Projection(matrix, bias)


def _in_float8(adapters: Sequence[LowRank], dtype: torch.dtype) -> Float8LowRank:
    return quantize_low_rank([a.down for a in adapters], [a.up for a in adapters], [a.scale for a in adapters], dtype)


def _merging_is_less(matrix: torch.Tensor, rows: int) -> bool:
    """Whether rank x out x in multiplications are fewer than rank x (out + in) for each row."""
    return matrix.numel() < rows * sum(matrix.shape)


@dataclasses.dataclass(frozen=True)
class Projection:
    """One linear: a float8 weight as stored, or a matrix in the compute dtype."""

    weight: StoredWeight | torch.Tensor
    bias: torch.Tensor
    adapters: Sequence[LowRank] = ()
    float8_lora: Float8LowRank | None = None

    @property
    def float8(self) -> bool:
        """Whether it takes `Float8Rows`."""
        return isinstance(self.weight, StoredWeight)

    def __call__(self, x: torch.Tensor | Float8Rows) -> Product:
        if isinstance(x, Float8Rows) and isinstance(self.weight, StoredWeight):
            product = Product(matmul(x, self.weight, self.bias.dtype), x.scale, self.bias)
            if self.float8_lora is not None:
                self.float8_lora.add_to(product.data, x)
            return product
        if isinstance(x, torch.Tensor) and isinstance(self.weight, torch.Tensor):
            product = Product(F.linear(x, self.weight, self.bias))
            for adapter in self.adapters:
                adapter.add_to(product.data, x)
            return product
        raise TypeError(f"a linear over {type(self.weight).__name__} was given {type(x).__name__}")
