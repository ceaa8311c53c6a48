"""Scales that accompany a stored tensor: their presence, their shape, the cuBLAS block order."""

from __future__ import annotations

import torch

from ..errors import QuantError
from .bits import damaged
from .weight import StoredWeight


def require(weight: StoredWeight, role: str) -> torch.Tensor:
    """The params tensor of that role. Raises: QuantError: the file has none."""
    if role not in weight.params:
        raise QuantError(
            "tensors_missing",
            "load",
            f"A {weight.format} tensor of shape {weight.shape} comes without its `{role}`",
            "Take a file that carries its scales",
        )
    return weight.params[role]


def broadcast_scale(weight: StoredWeight, scale: torch.Tensor) -> torch.Tensor:
    """The scale in float32, shaped to multiply the data: one number, or one for each row."""
    if not weight.shape or scale.numel() not in (1, weight.shape[0]):
        raise damaged(f"A {weight.format} tensor of shape {weight.shape} has a scale of {tuple(scale.shape)}")
    return scale.to(torch.float32).reshape(-1, *[1] * (len(weight.shape) - 1))


def padded_matrix(weight: StoredWeight, block: int, block_bytes: int) -> tuple[int, int]:
    """Stored rows and columns of a matrix padded to whole blocks in its columns, and perhaps in its rows."""
    if len(weight.shape) != 2:
        raise damaged(f"A {weight.format} tensor has the shape {weight.shape}; it must be a matrix")
    rows, columns = (-(-n // block) * block for n in weight.shape)
    width = columns // block * block_bytes
    if tuple(weight.data.shape) not in ((rows, width), (weight.shape[0], width)):
        raise damaged(f"A {weight.format} tensor of shape {weight.shape} stores {tuple(weight.data.shape)}")
    return weight.data.shape[0], columns


def unblocked(weight: StoredWeight, rows: int, columns: int) -> torch.Tensor:
    """The bytes of `scale` as (rows, columns), from cuBLAS's order: tiles of 128 x 4, in a tile 32 rows of 4 x 4.

    Source: https://docs.nvidia.com/cuda/cublas/index.html#d-block-scaling-factors-layout
    """
    scale = require(weight, "scale").view(torch.uint8)
    tall, wide = -(-rows // 128), -(-columns // 4)
    if scale.numel() != tall * 128 * wide * 4:
        raise damaged(f"{rows} x {columns} {weight.format} block scales are stored as {tuple(scale.shape)}")
    tiles = scale.reshape(tall, wide, 32, 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(tall * 128, wide * 4)[:rows, :columns]
