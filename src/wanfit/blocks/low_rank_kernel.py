# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN201
"""Triton kernel: a linear's result with its LoRA, into what reads it; the LoRA's part never goes through memory."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows", "length"])
def add_low_rank(
    x, inner, up, row_scale, bias, gate, out, rows, length, rank, inner_row, out_batch, out_row, gate_batch, gate_row,
    dim, SCALED: tl.constexpr, BIASED: tl.constexpr, GATED: tl.constexpr, ONE_GATE: tl.constexpr, ADD: tl.constexpr,
    STEP: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """out (+)= ((x + inner @ up.T) * row_scale + bias) * gate, a tile of ROWS x COLUMNS.

    ONE_GATE: the same vector for all rows; a tile reads it once.
    """
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid, there = row < rows, column < dim
    inside = valid[:, None] & there[None, :]
    value = tl.load(x + row[:, None] * dim + column[None, :], mask=inside, other=0.0).to(tl.float32)
    for first in range(0, rank, STEP):
        k = first + tl.arange(0, STEP)
        left = tl.load(
            inner + row[:, None] * inner_row + k[None, :], mask=valid[:, None] & (k < rank)[None, :], other=0.0
        )
        right = tl.load(up + column[None, :] * rank + k[:, None], mask=there[None, :] & (k < rank)[:, None], other=0.0)
        value = tl.dot(left, right, value)
    if SCALED:
        value = value * tl.load(row_scale + row, mask=valid, other=0.0)[:, None]
    if BIASED:
        value = value + tl.load(bias + column, mask=there, other=0.0).to(tl.float32)[None, :]
    batch, token = row // length, row % length
    if GATED and ONE_GATE:
        value = value * tl.load(gate + column, mask=there, other=0.0).to(tl.float32)[None, :]
    elif GATED:
        at = gate + (batch * gate_batch + token * gate_row)[:, None] + column[None, :]
        value = value * tl.load(at, mask=inside, other=0.0).to(tl.float32)
    target = out + (batch * out_batch + token * out_row)[:, None] + column[None, :]
    if ADD:
        value = value + tl.load(target, mask=inside, other=0.0).to(tl.float32)
    tl.store(target, value.to(out.dtype.element_ty), mask=inside)
