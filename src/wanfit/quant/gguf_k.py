"""GGUF super-blocks of 256 elements: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

Each function takes uint8 blocks (rows, blocks, block_bytes) and returns (rows, blocks, groups, group_size) in
`dtype`, equal bit for bit in float32 to `gguf.quants.dequantize`, in lower dtypes to its rounding: every product
is exact in float32, so the order of the operations does not matter and only the last subtraction rounds.

Source: gguf-py gguf/quants.py, MIT.
"""

from __future__ import annotations

import torch

from .bits import affine, half, unpack


def q2_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """16 scale bytes (low nibble scale, high nibble minimum), 64 bytes of 2-bit values, f16 d, f16 dmin."""
    scales = blocks[..., :16]
    q = unpack(blocks[..., 16:80].unflatten(-1, (2, 32)), 2).flatten(-3).unflatten(-1, (16, 16))
    scale = half(blocks, 80) * (scales & 15)
    offset = half(blocks, 82).neg_() * (scales >> 4)
    return affine(q, scale.unsqueeze(-1), offset.unsqueeze(-1), dtype)


def q3_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """32 bytes of high bits, 64 bytes of 2-bit values, 12 bytes of 6-bit scales, f16 d."""
    scale = unpack(blocks[..., 96:104], 4).flatten(-2)
    scale.add_(unpack(blocks[..., 104:108], 2).flatten(-2), alpha=16)
    q = unpack(blocks[..., 32:96].unflatten(-1, (2, 32)), 2).flatten(-3)
    q.add_(unpack(blocks[..., :32], 1).flatten(-2), alpha=4)  # a clear high bit means minus 4
    q = q.view(torch.int8).sub_(4).unflatten(-1, (16, 16))
    return affine(q, (half(blocks, 108) * scale.view(torch.int8).sub_(32)).unsqueeze(-1), None, dtype)


def q4_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f16 d, f16 dmin, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles (two groups of 32 in each 32)."""
    q = unpack(blocks[..., 16:].unflatten(-1, (4, 32)), 4).flatten(-3, -2)
    return affine(q, *_scale_and_offset(blocks), dtype)


def q5_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As Q4_K with 32 bytes more: bit g of byte i is the fifth bit of element i of group g."""
    q = unpack(blocks[..., 48:].unflatten(-1, (4, 32)), 4).flatten(-3, -2)
    q.add_(unpack(blocks[..., 16:48], 1), alpha=16)
    return affine(q, *_scale_and_offset(blocks), dtype)


def q6_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """128 bytes of low nibbles, 64 bytes of high 2-bit values, 16 int8 scales, f16 d."""
    q = unpack(blocks[..., :128].unflatten(-1, (2, 64)), 4).flatten(-3)
    q.add_(unpack(blocks[..., 128:192].unflatten(-1, (2, 32)), 2).flatten(-3), alpha=16)
    q = q.view(torch.int8).sub_(32).unflatten(-1, (16, 16))
    scale = half(blocks, 208) * blocks[..., 192:208].view(torch.int8)
    return affine(q, scale.unsqueeze(-1), None, dtype)


def _scale_and_offset(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """d * scale and -dmin * minimum of the 8 groups of Q4_K and Q5_K, each float32 (..., 8, 1)."""
    low, mid, high = blocks[..., 4:16].unflatten(-1, (3, 4)).unbind(-2)
    scale = torch.cat([low & 63, (high & 15) | ((low >> 2) & 48)], dim=-1)
    minimum = torch.cat([mid & 63, (high >> 4) | ((mid >> 2) & 48)], dim=-1)
    return (half(blocks, 0) * scale).unsqueeze(-1), (half(blocks, 2).neg_() * minimum).unsqueeze(-1)
