# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202
"""GGUF dequantisation in one pass over the stored bytes: Q8_0, Q4_K, Q5_K, Q6_K.

The plain functions in `gguf_k` and `gguf_legacy` are the reference; the layouts are described there.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_GROUPS = 64
"""Groups of elements that share a scale, for one program."""


@triton.jit
def _q8_0(data, halves, out, groups, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    column = tl.arange(0, 32)
    scale = tl.load(halves + group * 17, mask=inside, other=0.0).to(tl.float32)
    at = group[:, None] * 34 + 2 + column[None, :]
    q = tl.load(data + at, mask=inside[:, None], other=0).to(tl.int8, bitcast=True)
    value = q.to(tl.float32) * scale[:, None]
    tl.store(out + group[:, None] * 32 + column[None, :], value.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _q4_or_5_k(data, halves, out, groups, BYTES: tl.constexpr, NIBBLES: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    block, g = group // 8, (group % 8).to(tl.int32)
    base = block * BYTES
    d = tl.load(halves + block * (BYTES // 2), mask=inside, other=0.0).to(tl.float32)
    dmin = tl.load(halves + block * (BYTES // 2) + 1, mask=inside, other=0.0).to(tl.float32)
    low = tl.load(data + base + 4 + g % 4, mask=inside, other=0).to(tl.int32)
    mid = tl.load(data + base + 8 + g % 4, mask=inside, other=0).to(tl.int32)
    high = tl.load(data + base + 12 + g % 4, mask=inside, other=0).to(tl.int32)
    scale = tl.where(g < 4, low & 63, (high & 15) | ((low >> 2) & 48)).to(tl.float32)
    minimum = tl.where(g < 4, mid & 63, (high >> 4) | ((mid >> 2) & 48)).to(tl.float32)
    column = tl.arange(0, 32)
    at = (base + NIBBLES + (g // 2) * 32)[:, None] + column[None, :]
    packed = tl.load(data + at, mask=inside[:, None], other=0).to(tl.int32)
    q = (packed >> ((g % 2) * 4)[:, None]) & 15
    if BYTES == 176:
        fifth = tl.load(data + (base + 16)[:, None] + column[None, :], mask=inside[:, None], other=0).to(tl.int32)
        q += ((fifth >> g[:, None]) & 1) << 4
    value = q.to(tl.float32) * (d * scale)[:, None] - (dmin * minimum)[:, None]
    tl.store(out + group[:, None] * 32 + column[None, :], value.to(out.dtype.element_ty), mask=inside[:, None])


@triton.jit
def _q6_k(data, halves, out, groups, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = group < groups
    block, g = group // 16, (group % 16).to(tl.int32)
    base = block * 210
    half, quarter, first = g // 8, (g % 8) // 2, (g % 2) * 16
    d = tl.load(halves + block * 105 + 104, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(data + base + 192 + g, mask=inside, other=0).to(tl.int8, bitcast=True).to(tl.float32)
    column = tl.arange(0, 16)
    at = (base + half * 64 + (quarter % 2) * 32 + first)[:, None] + column[None, :]
    low = tl.load(data + at, mask=inside[:, None], other=0).to(tl.int32)
    at = (base + 128 + half * 32 + first)[:, None] + column[None, :]
    high = tl.load(data + at, mask=inside[:, None], other=0).to(tl.int32)
    q = ((low >> ((quarter // 2) * 4)[:, None]) & 15) + (((high >> (quarter * 2)[:, None]) & 3) << 4) - 32
    value = q.to(tl.float32) * (d * scale)[:, None]
    tl.store(out + group[:, None] * 16 + column[None, :], value.to(out.dtype.element_ty), mask=inside[:, None])


# format -> (kernel, bytes of a block, groups in a block, elements of a group, constants)
_KERNELS = {
    "q8_0": (_q8_0, 34, 1, 32, {}),
    "q4_k": (_q4_or_5_k, 144, 8, 32, {"BYTES": 144, "NIBBLES": 16}),
    "q5_k": (_q4_or_5_k, 176, 8, 32, {"BYTES": 176, "NIBBLES": 48}),
    "q6_k": (_q6_k, 210, 16, 16, {}),
}
FORMATS = frozenset(_KERNELS)


def dequantize_blocks(data: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor:
    """Elements in order, (count,), in `dtype`.

    Args:
        data: uint8, dense, at an even address; whole blocks of `format`.
    Memory: the result alone.
    """
    kernel, block_bytes, groups, size, constants = _KERNELS[format]
    count = data.numel() // block_bytes * groups
    out = torch.empty(count * size, dtype=dtype, device=data.device)
    flat = data.reshape(-1)
    with torch.cuda.device_of(data):
        kernel[(triton.cdiv(count, _GROUPS),)](flat, flat.view(torch.float16), out, count, BLOCK=_GROUPS, **constants)
    return out
