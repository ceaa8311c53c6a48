"""Rotary position embedding."""

from __future__ import annotations

import torch


def rotate_into(target: torch.Tensor, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, num_heads: int) -> None:
    """Write x, rotated, to target; computed in float32.

    Args:
        target: (B, C, dim), any strides with dense rows, any float dtype.
        x: (B, C, dim), dense; overwritten when it is float32.
        cos, sin: (1, C, 1, head_dim), each value twice in a row, as diffusers' `WanRotaryPosEmbed` gives them.

    Memory: one float32 copy of x, where diffusers has four of half the width.
    """
    turn = torch.complex(cos[..., 0::2].float(), sin[..., 1::2].float())
    pairs = torch.view_as_complex(x.float().unflatten(2, (num_heads, -1, 2)))
    target.unflatten(2, (num_heads, -1, 2)).copy_(torch.view_as_real(pairs.mul_(turn)))
