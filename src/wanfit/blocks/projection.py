"""Linears of a block: the stored weight is read once and applied to all chunks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F

from ..errors import CheckpointError
from ..quant import dequantize
from ..quant.float8_matmul import Float8Rows, matmul, quantize_rows, takes_float8
from ..quant.weight import StoredWeight
from .adapter import LowRank
from .float8_adapter import Float8LowRank, in_float8
from .product import Product


class BlockWeights:
    """The weights of one block by their original names, given out in the compute dtype.

    Args:
        weights: as `WeightSource.onload` gives them.
        dtype: compute dtype.
        adapters: LoRAs by the name of their linear: `self_attn.q`, `ffn.0` ...
        float8: multiply in float8 where the stored weight is one.
        rows: of the inputs of its linears, unless said otherwise.
        quantize: (B, C, dim) to float8.
    """

    def __init__(
        self,
        weights: Mapping[str, StoredWeight],
        dtype: torch.dtype,
        adapters: Mapping[str, Sequence[LowRank]] | None = None,
        *,
        float8: bool = False,
        rows: int = 1,
        quantize: Callable[[torch.Tensor], Float8Rows] = quantize_rows,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self._adapters = adapters or {}
        self._float8 = float8 and dtype.itemsize == 2
        self._rows = rows
        self._quantize = quantize

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
        if self._float8 and all(takes_float8(weight) for weight in stored):
            loras = in_float8([self._adapters.get(name, ()) for name in names], self._dtype, self._quantize)
            return tuple(
                Projection(weight, self.tensor(f"{name}.bias"), float8_lora=lora)
                for name, weight, lora in zip(names, stored, loras, strict=True)
            )
        return tuple(
            self._dequantised(name, weight, self._rows if rows is None else rows)
            for name, weight in zip(names, stored, strict=True)
        )

    def _dequantised(self, name: str, stored: StoredWeight, rows: int) -> Projection:
        adapters, bias = self._adapters.get(name, ()), self.tensor(f"{name}.bias")
        matrix = dequantize(stored, self._dtype)
        if not adapters or not _merging_is_less(matrix, rows):
            return Projection(matrix, bias, adapters)
        own = matrix.data_ptr() != stored.data.data_ptr()
        for adapter in adapters:
            matrix = adapter.merged_into(matrix, in_place=own)
            own = True
        return Projection(matrix, bias)


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
            low_rank = None if self.float8_lora is None else self.float8_lora.term(x)
            return Product(matmul(x, self.weight, self.bias.dtype), x.scale, self.bias, low_rank)
        if isinstance(x, torch.Tensor) and isinstance(self.weight, torch.Tensor):
            product = Product(F.linear(x, self.weight, self.bias))
            for adapter in self.adapters:
                adapter.add_to(product.data, x)
            return product
        raise TypeError(f"a linear over {type(self.weight).__name__} was given {type(x).__name__}")
