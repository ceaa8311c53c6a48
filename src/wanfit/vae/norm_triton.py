# pyright: basic, reportMissingImports=false, reportIndexIssue=false
# ruff: noqa: ANN001, ANN202
"""RMS norm over channels and SiLU in one pass, for activations channels last, with Triton.

`ops.norm_into` is the reference. Computed in float32, rounded once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ELEMENTS = 4096
"""Of one program, about."""


@triton.jit(do_not_specialize=["positions", "height", "width"])
def _norm_silu(
    x, gamma, out, positions, height, width, x_frame, x_row, x_column, scale,
    CHANNELS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    position = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    channel = tl.arange(0, BLOCK)
    inside = (position < positions)[:, None] & (channel < CHANNELS)[None, :]
    column, line = position % width, position // width
    source = (line // height) * x_frame + (line % height) * x_row + column * x_column
    value = tl.load(x + source[:, None] + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    length = tl.maximum(tl.sqrt(tl.sum(value * value, axis=1)), 1e-12)
    factor = tl.load(gamma + channel, mask=channel < CHANNELS, other=0.0).to(tl.float32) * scale
    value = value / length[:, None] * factor[None, :]
    if SILU:
        value = value / (1.0 + tl.exp(-value))
    target = position[:, None] * CHANNELS + channel[None, :]
    tl.store(out + target, value.to(out.dtype.element_ty), mask=inside)


def fits(x: torch.Tensor, out: torch.Tensor) -> bool:
    """Whether (1,C,T,H,W) `x` has its channels side by side, and `out` is densely packed, channels last."""
    return x.ndim == 5 and x.shape[0] == 1 and x.stride(1) == 1 and out.permute(0, 2, 3, 4, 1).is_contiguous()


def norm_silu(x: torch.Tensor, gamma: torch.Tensor, scale: float, out: torch.Tensor, *, silu: bool) -> None:
    """out = SiLU(x / |x| * scale * gamma); `fits(x, out)`, `gamma` (C,)."""
    _, channels, frames, height, width = x.shape
    positions = frames * height * width
    block = triton.next_power_of_2(channels)
    rows = max(1, _ELEMENTS // block)
    _norm_silu[(triton.cdiv(positions, rows),)](
        x, gamma, out, positions, height, width, x.stride(2), x.stride(3), x.stride(4), scale,
        CHANNELS=channels, BLOCK=block, ROWS=rows, SILU=silu, num_warps=4,
    )  # fmt: skip
