# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN201, ANN202
"""Triton kernels of the element-wise parts of a block; `elementwise_triton` calls them.

Each program works on one row. The number of rows and of tokens is no part of a kernel's specialisation, and strides
are multiples of 16 whatever the size of the video: nothing is compiled again when only the size changes, and rows are
read and written 16 bytes at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LENGTH = ["length"]


@triton.jit
def _store_row(value, out, out_scale, row, column, inside, QUANTIZE: tl.constexpr):
    if QUANTIZE:
        scale = tl.maximum(tl.max(tl.abs(value), axis=0), 1e-12)
        tl.store(out_scale + row, scale)
        value = tl.minimum(tl.maximum(value * (448.0 / scale), -448.0), 448.0)
    tl.store(out + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _vector(source, column, inside):
    return tl.load(source + column, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _product(
    x, low_rank, row_scale, bias, row, column, dim,
    LOW_RANK: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    value = _vector(x + row * dim, column, column < dim)
    if LOW_RANK:
        value = value + _vector(low_rank + row * dim, column, column < dim)
    if SCALED:
        value = value * tl.load(row_scale + row)
    if BIASED:
        value = value + _vector(bias, column, column < dim)
    return value


@triton.jit(do_not_specialize=_LENGTH)
def norm(
    x, shift, scale, out, out_scale, length, x_batch, x_row, shift_batch, shift_row, scale_batch, scale_row, dim, eps,
    QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    column = tl.arange(0, BLOCK)
    inside = column < dim
    value = _vector(x + batch * x_batch + token * x_row, column, inside)
    mean = tl.sum(value, axis=0) / dim
    value = tl.where(inside, value - mean, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps)
    value = value * _vector(scale + batch * scale_batch + token * scale_row, column, inside)
    value = value + _vector(shift + batch * shift_batch + token * shift_row, column, inside)
    _store_row(value, out + row * dim, out_scale, row, column, inside, QUANTIZE)


@triton.jit(do_not_specialize=_LENGTH)
def rms_rotate(
    x, low_rank, row_scale, bias, weight, cos, sin, out, length, out_batch, out_row, dim, eps,
    LOW_RANK: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, ROTATE: tl.constexpr, HEAD: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    column = tl.arange(0, BLOCK)
    inside = column < dim
    value = _product(x, low_rank, row_scale, bias, row, column, dim, LOW_RANK, SCALED, BIASED)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / dim + eps) * _vector(weight, column, inside)
    if ROTATE:
        real, imaginary = tl.split(tl.reshape(value, (BLOCK // HEAD, HEAD // 2, 2)))
        pair = tl.arange(0, HEAD // 2) * 2
        c = tl.load(cos + token * HEAD + pair).to(tl.float32)[None, :]
        s = tl.load(sin + token * HEAD + pair + 1).to(tl.float32)[None, :]
        value = tl.reshape(tl.join(real * c - imaginary * s, real * s + imaginary * c), (BLOCK,))
    tl.store(out + batch * out_batch + token * out_row + column, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def gelu(
    x, low_rank, row_scale, bias, out, out_scale, dim,
    LOW_RANK: tl.constexpr, SCALED: tl.constexpr, BIASED: tl.constexpr, QUANTIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = _product(x, low_rank, row_scale, bias, row, column, dim, LOW_RANK, SCALED, BIASED)
    # 0.5 (1 + tanh(u)) is sigmoid(2 u)
    value = value * tl.sigmoid(1.5957691216057308 * (value + 0.044715 * value * value * value))
    _store_row(value, out + row * dim, out_scale, row, column, column < dim, QUANTIZE)


@triton.jit(do_not_specialize=_LENGTH)
def add(
    x, row_scale, bias, gate, out, length, out_batch, out_row, gate_batch, gate_row, dim,
    SCALED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    column = tl.arange(0, BLOCK)
    inside = column < dim
    value = _product(x, x, row_scale, bias, row, column, dim, False, SCALED, BIASED)
    target = out + batch * out_batch + token * out_row + column
    if GATED:
        value = value * _vector(gate + batch * gate_batch + token * gate_row, column, inside)
    if ADD:
        value = value + tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_LENGTH)
def quantize(x, out, out_scale, length, x_batch, x_row, dim, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // length, row % length
    column = tl.arange(0, BLOCK)
    inside = column < dim
    value = tl.load(x + batch * x_batch + token * x_row + column, mask=inside, other=0.0).to(tl.float32)
    _store_row(value, out + row * dim, out_scale, row, column, inside, True)


@triton.jit(do_not_specialize=["length", "scale_batch"])
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


@triton.jit(do_not_specialize=["length", "scale_batch"])
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
