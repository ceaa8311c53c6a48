"""The arithmetic of the layers, written into given buffers. Same operations in the same order as the models."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from ..quant.triton_support import triton_refusal
from .layers import Attention, Conv, Norm, Shortcut

WeightReader = Callable[[nn.Module, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Gives (weight, bias) of a convolution for an input: a host that keeps weights elsewhere brings its own."""


def module_weights(module: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The module's own parameters."""
    return module.weight, module.bias  # pyright: ignore[reportReturnType]


def norm_into(x: torch.Tensor, norm: Norm, out: torch.Tensor, *, silu: bool) -> None:
    """out = x / |x| * scale * gamma over dimension 1, then SiLU. `out` has the shape of `x`, any strides.

    float32: operation for operation as in the models. 16 bit: the length is taken in float32, without a float32
    copy of `x`, and scale * gamma is one factor: one rounding less than in the models. With Triton, channels last, it
    is one kernel that rounds once.
    """
    module = norm.module
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16) and triton_refusal(x.device) is None:
        from .norm_triton import fits, norm_silu

        if fits(x, out):
            norm_silu(x, module.gamma.to(x.device).flatten(), module.scale, out, silu=silu)
            return
    gamma = module.gamma.view(1, -1, *(1,) * (x.ndim - 2)).to(x.device)
    wide = x.dtype in (torch.float32, torch.float64)
    length = torch.linalg.vector_norm(x, 2, dim=1, keepdim=True, dtype=None if wide else torch.float32).clamp_min_(
        1e-12
    )
    torch.div(x, length, out=out)
    if wide:
        out.mul_(module.scale).mul_(gamma.to(x.dtype))
    else:
        out.mul_(gamma.float() * module.scale)
    if silu and x.device.type == "cpu":
        out.copy_(F.silu(out.contiguous(), inplace=True))
    elif silu:
        F.silu(out, inplace=True)


def attend(
    layer: Attention, x: torch.Tensor, conv: Callable[[Conv, torch.Tensor], torch.Tensor], rows: int
) -> torch.Tensor:
    """Attention over the pixels of each frame, added to `x` (1,C,T,h,w). `rows`: queries at a time, 0 for all.

    Source: diffusers models/autoencoders/autoencoder_kl_wan.py (`WanAttentionBlock`), Apache-2.0.
    """
    _, channels, frames, height, width = x.shape
    flat = x.permute(0, 2, 1, 3, 4).reshape(frames, channels, height, width)
    normed = torch.empty_like(flat)
    norm_into(flat, layer.norm, normed, silu=False)
    qkv = conv(layer.qkv, normed).reshape(frames, 1, channels * 3, -1).permute(0, 1, 3, 2).contiguous()
    del normed
    query, key, value = qkv.chunk(3, dim=-1)
    pieces = query.split(rows or query.shape[2], dim=2)
    mixed = torch.cat([F.scaled_dot_product_attention(piece, key, value) for piece in pieces], dim=2)
    del qkv, query, key, value, pieces
    mixed = mixed.squeeze(1).permute(0, 2, 1).reshape(frames, channels, height, width)
    out = conv(layer.proj, mixed).view(1, frames, channels, height, width).permute(0, 2, 1, 3, 4)
    return out.add_(x)


def repeated_channels(shortcut: Shortcut, device: torch.device) -> torch.Tensor:
    """For each (time phase, row phase, column phase): the input channel of every output channel (ft*fs*fs, out).

    Source: diffusers models/autoencoders/autoencoder_kl_wan.py (`DupUp3D`), Apache-2.0.
    """
    factor = shortcut.factor_t * shortcut.factor_s**2
    repeats = shortcut.outputs * factor // shortcut.inputs
    order = torch.arange(shortcut.outputs * factor, device=device) // repeats
    return order.view(shortcut.outputs, factor).t().contiguous()


def add_repeated(out: torch.Tensor, x: torch.Tensor, shortcut: Shortcut, phase: int, order: torch.Tensor) -> None:
    """Adds time phase `phase` of the up-shortcut of one frame `x` (C,h,w) to `out` (Co, fs*h, fs*w), in place."""
    step = shortcut.factor_s
    for row in range(step):
        for column in range(step):
            channels = order[(phase * step + row) * step + column]
            out[:, row::step, column::step].add_(x.index_select(0, channels))


def mean_of_groups(x: torch.Tensor, shortcut: Shortcut) -> torch.Tensor:
    """The down-shortcut of `x` (1,C,T,h,w); a first frame is paired with a zero frame before it.

    Source: diffusers models/autoencoders/autoencoder_kl_wan.py (`AvgDown3D`), Apache-2.0.
    """
    time, space = shortcut.factor_t, shortcut.factor_s
    missing = -x.shape[2] % time
    if missing:
        x = F.pad(x, (0, 0, 0, 0, missing, 0))
    _, channels, frames, height, width = x.shape
    x = x.reshape(1, channels, frames // time, time, height // space, space, width // space, space)
    x = x.permute(0, 1, 3, 5, 7, 2, 4, 6)
    shape = (1, shortcut.outputs, -1, frames // time, height // space, width // space)
    return x.reshape(shape).mean(dim=2)
