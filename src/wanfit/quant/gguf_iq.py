"""GGUF types with a codebook of 16 values: IQ4_NL, IQ4_XS.

Each function takes uint8 blocks (rows, blocks, block_bytes) and returns (rows, blocks, ..., 16) in `dtype`, equal
bit for bit in float32 to `gguf.quants.dequantize`, in lower dtypes to its rounding.

Source: gguf-py gguf/quants.py, MIT.
"""

from __future__ import annotations

import torch

from .bits import affine, half, look_up, pair_table, unpack

_CODEBOOK = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def iq4_nl(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f16 d, 16 bytes: low nibbles are elements 0-15, high nibbles 16-31."""
    return affine(_codes(blocks[..., 2:]), half(blocks, 0).unsqueeze(-1), None, dtype)


def iq4_xs(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f16 d, u16 of high 2-bit scales, 4 bytes of low nibbles of 8 scales, 8 groups of 16 bytes as in IQ4_NL."""
    scale = unpack(blocks[..., 4:8], 4).transpose(-1, -2).flatten(-2)
    scale = scale.add(unpack(blocks[..., 2:4], 2).transpose(-1, -2).flatten(-2), alpha=16)
    scale = half(blocks, 0) * scale.view(torch.int8).sub_(32)
    q = _codes(blocks[..., 8:].unflatten(-1, (8, 16)))
    return affine(q, scale.unsqueeze(-1).unsqueeze(-1), None, dtype)


def _codes(packed: torch.Tensor) -> torch.Tensor:
    """Code values in the order of the elements: uint8 (..., 16) -> int8 (..., 2, 16)."""
    table = pair_table(_CODEBOOK, packed.device, high_first=False)
    return look_up(packed, table).transpose(-1, -2)
