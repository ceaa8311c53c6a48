# pyright: basic, reportMissingImports=false, reportIndexIssue=false
"""The element-wise parts of a block in one pass over each row, with Triton.

`elementwise.PlainElementwise` is the reference.
"""

from __future__ import annotations

import torch
import triton

from ..quant.float8_matmul import Float8Rows
from . import elementwise_kernels as kernels
from .elementwise import PLAIN
from .low_rank_kernel import add_low_rank
from .product import LowRankTerm, Product

_TILE = (128, 64)
"""Rows and columns of one program that multiplies."""


def _steps(vectors: torch.Tensor) -> tuple[int, int]:
    """Strides of (B or 1, C or 1, dim), 0 where one vector serves all."""
    batch, row = vectors.stride(0), vectors.stride(1)
    return (batch if vectors.shape[0] > 1 else 0, row if vectors.shape[1] > 1 else 0)


def _block(dim: int) -> dict[str, int]:
    size = triton.next_power_of_2(dim)
    return {"BLOCK": size, "num_warps": min(16, max(4, size // 1024))}


def _empty(x: torch.Tensor, dtype: torch.dtype, quantize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn if quantize else dtype, device=x.device)
    scale = torch.empty(x.shape[:-1] if quantize else (1,), dtype=torch.float32, device=x.device)
    return data, scale


class TritonElementwise:
    """One kernel for each element-wise part; rows must be dense, of an even number of elements."""

    name = "triton"

    def norm(
        self,
        x: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
        *,
        dtype: torch.dtype,
        quantize: bool,
    ) -> torch.Tensor | Float8Rows:
        batch, length, dim = x.shape
        out, out_scale = _empty(x, dtype, quantize)
        with torch.cuda.device_of(x):
            kernels.norm[(batch * length,)](
                x, shift, scale, out, out_scale, length, x.stride(0), x.stride(1), *_steps(shift), *_steps(scale),
                dim, eps, QUANTIZE=quantize, **_block(dim),
            )  # fmt: skip
        return Float8Rows(out, out_scale) if quantize else out

    def rms_norm_rotate(
        self,
        product: Product,
        weight: torch.Tensor,
        eps: float,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        num_heads: int,
        out: torch.Tensor,
    ) -> None:
        batch, length, dim = out.shape
        size = dim // num_heads
        if size & (size - 1):
            PLAIN.rms_norm_rotate(product, weight, eps, rotary, num_heads, out)
            return
        x, row_scale, bias, flags = _parts(product)
        low_rank = product.low_rank_value()
        cos, sin = rotary or (x, x)
        with torch.cuda.device_of(x):
            kernels.rms_rotate[(batch * length,)](
                x, _or(low_rank, x), row_scale, bias, weight, cos.contiguous(), sin.contiguous(), out, length,
                *out.stride()[:2], dim, eps, ROTATE=rotary is not None, HEAD=size, LOW_RANK=low_rank is not None,
                **flags, **_block(dim),
            )  # fmt: skip

    def gelu(self, product: Product, *, quantize: bool) -> torch.Tensor | Float8Rows:
        x, row_scale, bias, flags = _parts(product)
        low_rank = product.low_rank_value()
        dim = x.shape[-1]
        out, out_scale = _empty(x, x.dtype, True) if quantize else (x, x)
        with torch.cuda.device_of(x):
            kernels.gelu[(x.numel() // dim,)](
                x, _or(low_rank, x), row_scale, bias, out, out_scale, dim, QUANTIZE=quantize,
                LOW_RANK=low_rank is not None, **flags, **_block(dim),
            )  # fmt: skip
        return Float8Rows(out, out_scale) if quantize else out

    def store(self, product: Product, out: torch.Tensor) -> None:
        self._add(product, None, out, add=False)

    def add_gated(self, product: Product, gate: torch.Tensor | None, residual: torch.Tensor) -> None:
        self._add(product, gate, residual, add=True)

    def quantize(self, x: torch.Tensor) -> Float8Rows:
        batch, length, dim = x.shape
        out, out_scale = _empty(x, x.dtype, True)
        with torch.cuda.device_of(x):
            kernels.quantize[(batch * length,)](x, out, out_scale, length, x.stride(0), x.stride(1), dim, **_block(dim))
        return Float8Rows(out, out_scale)

    def pack(self, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
        batch, length, heads, size = x.shape
        if size & (size - 1):
            PLAIN.pack(x, data, scale)
            return
        with torch.cuda.device_of(x):
            kernels.pack[(batch * length,)](
                x, data, scale, length, *x.stride()[:3], *data.stride()[:2], *scale.stride()[:2], heads,
                SIZE=size, HEADS=triton.next_power_of_2(heads),
            )  # fmt: skip

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        batch, length, heads, size = data.shape
        if size & (size - 1):
            return PLAIN.unpack(data, scale, dtype)
        out = torch.empty(data.shape, dtype=dtype, device=data.device)
        with torch.cuda.device_of(data):
            kernels.unpack[(batch * length,)](
                data, out, scale, length, *data.stride()[:2], *out.stride()[:2], *scale.stride()[:2], heads,
                SIZE=size, HEADS=triton.next_power_of_2(heads),
            )  # fmt: skip
        return out

    def _add(self, product: Product, gate: torch.Tensor | None, out: torch.Tensor, *, add: bool) -> None:
        if product.low_rank is not None:
            self._add_low_rank(product, product.low_rank, gate, out, add=add)
            return
        batch, length, dim = out.shape
        x, row_scale, bias, flags = _parts(product)
        steps = (0, 0) if gate is None else _steps(gate)
        with torch.cuda.device_of(x):
            kernels.add[(batch * length,)](
                x, row_scale, bias, _or(gate, x), out, length, *out.stride()[:2], *steps, dim,
                GATED=gate is not None, ADD=add, **flags, **_block(dim),
            )  # fmt: skip

    def _add_low_rank(
        self, product: Product, low_rank: LowRankTerm, gate: torch.Tensor | None, out: torch.Tensor, *, add: bool
    ) -> None:
        batch, length, dim = out.shape
        x, row_scale, bias, flags = _parts(product)
        inner, up = low_rank.inner, low_rank.up
        steps = (0, 0) if gate is None else _steps(gate)
        with torch.cuda.device_of(x):
            add_low_rank[(triton.cdiv(dim, _TILE[1]), triton.cdiv(batch * length, _TILE[0]))](
                x, inner, up, row_scale, bias, _or(gate, x), out, batch * length, length, up.shape[1],
                inner.stride(0), *out.stride()[:2], *steps, dim, GATED=gate is not None, ONE_GATE=steps == (0, 0),
                ADD=add, STEP=64, ROWS=_TILE[0], COLUMNS=_TILE[1], **flags, num_warps=4,
            )  # fmt: skip


def _parts(product: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, bool]]:
    """Data, row scales and bias; where one is missing the data stands in, and its flag is off."""
    data, row_scale, bias = product.data, product.row_scale, product.bias
    return data, _or(row_scale, data), _or(bias, data), {"SCALED": row_scale is not None, "BIASED": bias is not None}


def _or(given: torch.Tensor | None, stand_in: torch.Tensor) -> torch.Tensor:
    """A kernel takes a pointer whether or not it reads it."""
    return stand_in if given is None else given
