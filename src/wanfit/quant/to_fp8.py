"""Quantising a 16- or 32-bit tensor to scaled float8."""

from __future__ import annotations

import torch

from .table import dequantize
from .weight import StoredWeight

_FP8 = torch.float8_e4m3fn


def to_fp8(weight: StoredWeight) -> StoredWeight:
    """The tensor as float8 e4m3 with one scale: its largest value becomes the largest that the format holds.

    Args:
        weight: any format; a `f8_e4m3` tensor is returned as it is.
    Memory: the result, and the tensor in float32 for the time of the call.
    """
    if weight.format == "f8_e4m3":
        return weight
    values = dequantize(weight, torch.float32)
    scale = (values.abs().max() / torch.finfo(_FP8).max).clamp_min(torch.finfo(torch.float32).tiny)
    return StoredWeight("f8_e4m3", weight.shape, (values / scale).to(_FP8), {"scale": scale})
