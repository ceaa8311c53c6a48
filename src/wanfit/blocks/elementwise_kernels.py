# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Triton kernels of the element-wise parts of a block; `elementwise_triton` calls them.

Each program works on a few rows. Numbers that change with the size of the video are no part of a kernel's
specialisation: nothing is compiled again when only the size changes.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIZES = ["rows", "length", "x_batch", "out_batch"]


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


@triton.jit
def _product(x, row_scale, bias, row, rows, column, dim, SCALED: tl.constexpr, BIASED: tl.constexpr):
    value = _vector(x + row * dim, column, (column < dim) & (row < rows))
    if SCALED:
        value = value * tl.load(row_scale + row, mask=row < rows, other=0.0)
    if BIASED:
        value = value + bias
    return value


@triton.jit(do_not_specialize=_SIZES)
def norm(
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
def rms_rotate(
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
        value = _product(x, row_scale, offset, row, rows, column, dim, SCALED, BIASED)
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
def gelu(
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
        value = _product(x, row_scale, offset, row, rows, column, dim, SCALED, BIASED)
        # 0.5 (1 + tanh(u)) is sigmoid(2 u)
        value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
        _store_row(value, out + row * dim, out_scale, row, rows, column, here, QUANTIZE)


@triton.jit(do_not_specialize=_SIZES)
def add(
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
        value = _product(x, row_scale, offset, row, rows, column, dim, SCALED, BIASED)
        target = out + batch * out_batch + token * out_row + column
        if GATED:
            if not SHARED:
                factor = _vector(gate + batch * gate_batch + token * gate_row, column, here)
            value = value * factor
        if ADD:
            value = value + tl.load(target, mask=here, other=0.0).to(tl.float32)
        tl.store(target, value.to(out.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=_SIZES)
def quantize(x, out, out_scale, length, x_batch, x_row, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    column = tl.arange(0, BLOCK)
    inside = column < dim
    value = tl.load(x + batch * x_batch + token * x_row + column, mask=inside, other=0.0).to(tl.float32)
    _store_row(value, out + row * dim, out_scale, row, row + 1, column, inside, True)


@triton.jit(do_not_specialize=["length", "x_batch", "out_batch", "scale_batch"])
def pack(
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
def unpack(
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
