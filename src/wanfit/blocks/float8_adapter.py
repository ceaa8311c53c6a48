"""LoRAs beside float8 products: `down` of all linears of one input in one product, on the same float8 numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..quant.float8_matmul import LARGEST, Float8Rows, quantize_rows
from .adapter import LowRank
from .product import LowRankTerm

_ALIGNMENT = 16
"""Rows of `down` of one linear are a multiple: what a float8 product takes."""


@dataclass(frozen=True)
class Float8LowRank:
    """The LoRAs of one linear, all in one.

    Args:
        down: (rank of all, in) float8_e4m3fn, of all linears that read the same rows.
        up: (out, rank), 16 bit, with the scales of `down`'s rows in it.
        columns: of `down`'s product, those of this linear.
    """

    down: torch.Tensor
    up: torch.Tensor
    columns: slice

    def term(self, x: Float8Rows) -> LowRankTerm:
        """What they add to `float8_matmul.matmul` of the same rows, which is without the rows' scales too."""
        return LowRankTerm(x.times(self.down, self.up.dtype)[:, self.columns], self.up)


def in_float8(
    linears: Sequence[Sequence[LowRank]],
    dtype: torch.dtype,
    quantize: Callable[[torch.Tensor], Float8Rows] = quantize_rows,
) -> list[Float8LowRank | None]:
    """The LoRAs of linears that read the same rows; None for a linear without any.

    Relative error 3e-2 of what the LoRAs add, as the product itself.

    Args:
        quantize: of (1, rows, in).
    """
    parts: list[torch.Tensor] = []
    columns: list[slice] = []
    for adapters in linears:
        first = sum(map(len, parts))
        parts += [adapter.down.to(dtype) for adapter in adapters]
        stop = sum(map(len, parts))
        if missing := -stop % _ALIGNMENT:
            parts.append(parts[-1].new_zeros(missing, parts[-1].shape[1]))
        columns.append(slice(first, stop + missing))
    if not parts:
        return [None] * len(linears)
    rows = quantize(torch.cat(parts).unsqueeze(0))
    down, scales = rows.data[0], rows.scale[0]
    return [
        Float8LowRank(down, _with_scales(adapters, scales[where], dtype), where) if adapters else None
        for adapters, where in zip(linears, columns, strict=True)
    ]


def _with_scales(adapters: Sequence[LowRank], scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """(out, rank): every `up` times its strength and the scales of its `down`'s rows; 0 beyond the last."""
    up = torch.zeros(len(adapters[0].up), len(scales), dtype=dtype, device=scales.device)
    first = 0
    for adapter in adapters:
        where = slice(first, first + adapter.up.shape[1])
        torch.mul(adapter.up, scales[where] * (adapter.scale / LARGEST), out=up[:, where])
        first = where.stop
    return up
