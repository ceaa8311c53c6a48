# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202
"""The element-wise parts of a block in one pass over each row, with Triton.

`elementwise.PlainElementwise` is the reference. Each program works on a few rows. Numbers that change with the size of
the video are no part of a kernel's specialisation: nothing is compiled again when only the size changes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..quant.float8_matmul import Float8Rows
from .elementwise import PLAIN
from .product import Product

_SIZES = ["rows", "length", "x_batch", "out_batch"]
_ROWS = 4
"""Rows of one program: what all rows share is loaded once for so many."""


@triton.jit
def _store_row(value, out, out_scale, row, rows, column, inside, QUANTIZE: tl.constexpr):
    if QUANTIZE:
        scale = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-12)
        tl.store(out_scale + row, scale, mask=row < rows)
        value = tl.minimum(tl.maximum(value * (448.0 / scale), -448.0), 448.0)
    tl.store(out + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _vector(source, column, inside):
    return tl.load(source + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=_SIZES)
def _norm(
    x, shift, scale, out, out_scale, rows, length, x_batch, x_row, shift_batch, shift_row, scale_batch, scale_row,
    dim, eps, SHARED: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.arange(0, BLOCK)
    inside = column < dim
    factor = _vector(scale, column, inside)
    offset = _vector(shift, column, inside)
    for i in range(ROWS):
        row = first + i
        here = inside & (row < rows)
        batch, token = row // length, row % length
        value = _vector(x + batch * x_batch + token * x_row, column, here)
        mean = tl.sum(value, axis=0) / dim
        value = tl.where(inside, value - mean, 0.0)
        value = value * tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps)
        if not SHARED:
            factor = _vector(scale + batch * scale_batch + token * scale_row, column, here)
            offset = _vector(shift + batch * shift_batch + token * shift_row, column, here)
        _store_row(value * factor + offset, out + row * dim, out_scale, row, rows, column, here, QUANTIZE)


@triton.jit(do_not_specialize=_SIZES)
def _rms_rotate(
    x, row_scale, bias, weight, cos, sin, out, rows, length, out_batch, out_row, dim, eps, SCALED: tl.constexpr,
    BIASED: tl.constexpr, ROTATE: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.arange(0, BLOCK)
    inside = column < dim
    factor = _vector(weight, column, inside)
    offset = _vector(bias, column, inside)
    for i in range(ROWS):
        row = first + i
        here = inside & (row < rows)
        batch, token = row // length, row % length
        value = _vector(x + row * dim, column, here)
        if SCALED:
            value = value * tl.load(row_scale + row, mask=row < rows, other=0.0)
        if BIASED:
            value = value + offset
        value = value * tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps) * factor
        if ROTATE:
            real, imaginary = tl.split(tl.reshape(value, (BLOCK // 2, 2)))
            pair = tl.arange(0, BLOCK // 2)
            at = token * HEAD + (pair % (HEAD // 2)) * 2
            c = tl.load(cos + at, mask=row < rows, other=0.0).to(tl.float32)
            s = tl.load(sin + at + 1, mask=row < rows, other=0.0).to(tl.float32)
            value = tl.interleave(real * c - imaginary * s, real * s + imaginary * c)
        tl.store(out + batch * out_batch + token * out_row + column, value.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=_SIZES)
def _gelu(
    x, row_scale, bias, out, out_scale, rows, dim,
    SCALED: tl.constexpr, BIASED: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.arange(0, BLOCK)
    inside = column < dim
    offset = _vector(bias, column, inside)
    for i in range(ROWS):
        row = first + i
        here = inside & (row < rows)
        value = _vector(x + row * dim, column, here)
        if SCALED:
            value = value * tl.load(row_scale + row, mask=row < rows, other=0.0)
        if BIASED:
            value = value + offset
        # 0.5 (1 + tanh(u)) is sigmoid(2 u)
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
        _store_row(value, out + row * dim, out_scale, row, rows, column, here, QUANTIZE)


@triton.jit(do_not_specialize=_SIZES)
def _add(
    x, row_scale, bias, gate, out, rows, length, out_batch, out_row, gate_batch, gate_row, dim,
    SCALED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, SHARED: tl.constexpr, ADD: tl.constexpr,
    BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * ROWS
    column = tl.arange(0, BLOCK)
    inside = column < dim
    offset = _vector(bias, column, inside)
    factor = _vector(gate, column, inside)
    for i in range(ROWS):
        row = first + i
        here = inside & (row < rows)
        batch, token = row // length, row % length
        value = _vector(x + row * dim, column, here)
        if SCALED:
            value = value * tl.load(row_scale + row, mask=row < rows, other=0.0)
        if BIASED:
            value = value + offset
        target = out + batch * out_batch + token * out_row + column
        if GATED:
            if not SHARED:
                factor = _vector(gate + batch * gate_batch + token * gate_row, column, here)
            value = value * factor
        if ADD:
            value = value + tl.load(target, mask=here, other=0.0).to(tl.float32)
        tl.store(target, value.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=_SIZES)
def _quantize(x, out, out_scale, length, x_batch, x_row, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    column = tl.arange(0, BLOCK)
    inside = column < dim
    value = tl.load(x + batch * x_batch + token * x_row + column, mask=inside, other=0.0).to(tl.float32)
    _store_row(value, out + row * dim, out_scale, row, row + 1, column, inside, True)


@triton.jit(do_not_specialize=["length", "x_batch", "out_batch", "scale_batch"])
def _pack(
    x, out, scale, length, x_batch, x_token, x_head, out_batch, out_token, scale_batch, scale_token, heads,
    SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    head = tl.arange(0, HEADS)
    inside = head < heads
    column = tl.arange(0, SIZE)
    at = x + batch * x_batch + token * x_token + head[:, None] * x_head + column[None, :]
    value = tl.load(at, mask=inside[:, None], other=0.0).to(tl.float32)
    step = tl.maximum(tl.max(tl.abs(value), axis=1), 1e-12) / 127.0
    tl.store(scale + batch * scale_batch + token * scale_token + head, step, mask=inside)
    rounded = tl.floor(value / step[:, None] + 0.5)
    target = out + batch * out_batch + token * out_token + head[:, None] * SIZE + column[None, :]
    tl.store(target, rounded.to(tl.int8), mask=inside[:, None])


@triton.jit(do_not_specialize=["length", "x_batch", "out_batch", "scale_batch"])
def _unpack(
    x, out, scale, length, x_batch, x_token, out_batch, out_token, scale_batch, scale_token, heads,
    SIZE: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    head = tl.arange(0, HEADS)
    inside = head < heads
    column = tl.arange(0, SIZE)
    at = head[:, None] * SIZE + column[None, :]
    value = tl.load(x + batch * x_batch + token * x_token + at, mask=inside[:, None], other=0).to(tl.float32)
    step = tl.load(scale + batch * scale_batch + token * scale_token + head, mask=inside, other=0.0)
    target = out + batch * out_batch + token * out_token + at
    tl.store(target, (value * step[:, None]).to(out.dtype.element_ty), mask=inside[:, None])


def _steps(vectors: torch.Tensor) -> tuple[int, int]:
    """Strides of (B or 1, C or 1, dim), 0 where one vector serves all."""
    batch, row = vectors.stride(0), vectors.stride(1)
    return (batch if vectors.shape[0] > 1 else 0, row if vectors.shape[1] > 1 else 0)


def _shared(vectors: torch.Tensor) -> bool:
    return vectors.shape[0] == vectors.shape[1] == 1


def _grid(rows: int) -> tuple[int]:
    return (triton.cdiv(rows, _ROWS),)


def _block(dim: int) -> dict[str, int]:
    size = triton.next_power_of_2(dim)
    return {"BLOCK": size, "num_warps": min(16, max(4, size // 1024))}


def _empty(x: torch.Tensor, quantize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    data = torch.empty(x.shape, dtype=torch.float8_e4m3fn if quantize else x.dtype, device=x.device)
    scale = torch.empty(x.shape[:-1] if quantize else (1,), dtype=torch.float32, device=x.device)
    return data, scale


class TritonElementwise:
    """One kernel for each element-wise part; rows must be dense, of an even number of elements."""

    name = "triton"

    def norm(
        self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, eps: float, *, quantize: bool
    ) -> torch.Tensor | Float8Rows:
        batch, length, dim = x.shape
        out, out_scale = _empty(x, quantize)
        with torch.cuda.device_of(x):
            _norm[_grid(batch * length)](
                x, shift, scale, out, out_scale, batch * length, length, x.stride(0), x.stride(1), *_steps(shift),
                *_steps(scale), dim, eps, SHARED=_shared(shift) and _shared(scale), QUANTIZE=quantize, ROWS=_ROWS,
                **_block(dim),
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
        x, row_scale, bias, flags = _parts(product)
        cos, sin = rotary or (x, x)
        with torch.cuda.device_of(x):
            _rms_rotate[_grid(batch * length)](
                x, row_scale, bias, weight, cos.contiguous(), sin.contiguous(), out, batch * length, length,
                out.stride(0), out.stride(1), dim, eps, ROTATE=rotary is not None, HEAD=dim // num_heads, ROWS=_ROWS,
                **flags, **_block(dim),
            )  # fmt: skip

    def gelu(self, product: Product, *, quantize: bool) -> torch.Tensor | Float8Rows:
        x, row_scale, bias, flags = _parts(product)
        dim = x.shape[-1]
        out, out_scale = _empty(x, True) if quantize else (x, x)
        with torch.cuda.device_of(x):
            rows = x.numel() // dim
            _gelu[_grid(rows)](
                x, row_scale, bias, out, out_scale, rows, dim, QUANTIZE=quantize, ROWS=_ROWS, **flags, **_block(dim)
            )
        return Float8Rows(out, out_scale) if quantize else out

    def store(self, product: Product, out: torch.Tensor) -> None:
        self._add(product, None, out, add=False)

    def add_gated(self, product: Product, gate: torch.Tensor | None, residual: torch.Tensor) -> None:
        self._add(product, gate, residual, add=True)

    def quantize(self, x: torch.Tensor) -> Float8Rows:
        batch, length, dim = x.shape
        out, out_scale = _empty(x, True)
        with torch.cuda.device_of(x):
            _quantize[(batch * length,)](x, out, out_scale, length, x.stride(0), x.stride(1), dim, **_block(dim))
        return Float8Rows(out, out_scale)

    def pack(self, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
        batch, length, heads, size = x.shape
        if size & (size - 1):
            PLAIN.pack(x, data, scale)
            return
        with torch.cuda.device_of(x):
            _pack[(batch * length,)](
                x, data, scale, length, *x.stride()[:3], *data.stride()[:2], *scale.stride()[:2], heads,
                SIZE=size, HEADS=triton.next_power_of_2(heads),
            )  # fmt: skip

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        batch, length, heads, size = data.shape
        if size & (size - 1):
            return PLAIN.unpack(data, scale, dtype)
        out = torch.empty(data.shape, dtype=dtype, device=data.device)
        with torch.cuda.device_of(data):
            _unpack[(batch * length,)](
                data, out, scale, length, *data.stride()[:2], *out.stride()[:2], *scale.stride()[:2], heads,
                SIZE=size, HEADS=triton.next_power_of_2(heads),
            )  # fmt: skip
        return out

    def _add(self, product: Product, gate: torch.Tensor | None, out: torch.Tensor, *, add: bool) -> None:
        batch, length, dim = out.shape
        x, row_scale, bias, flags = _parts(product)
        steps = (0, 0) if gate is None else _steps(gate)
        with torch.cuda.device_of(x):
            _add[_grid(batch * length)](
                x, row_scale, bias, x if gate is None else gate, out, batch * length, length, out.stride(0),
                out.stride(1), *steps, dim, GATED=gate is not None, SHARED=gate is not None and _shared(gate),
                ADD=add, ROWS=_ROWS, **flags, **_block(dim),
            )  # fmt: skip


def _parts(product: Product) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, bool]]:
    """Data, row scales and bias; where one is missing the data stands in, and its flag is off."""
    data = product.data
    row_scale = data if product.row_scale is None else product.row_scale
    bias = data if product.bias is None else product.bias
    return data, row_scale, bias, {"SCALED": product.row_scale is not None, "BIASED": product.bias is not None}
