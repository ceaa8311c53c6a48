"""GGUF blocks of 32 elements: Q8_0, Q5_0, Q5_1, Q4_0, Q4_1.

Each function takes uint8 blocks (rows, blocks, block_bytes) and returns (rows, blocks, 32) in `dtype`, equal bit
for bit in float32 to `gguf.quants.dequantize`, in lower dtypes to its rounding.

Source: gguf-py gguf/quants.py, MIT.
"""

from __future__ import annotations

import torch

from .bits import affine, half, unpack


def q8_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f16 d, 32 int8."""
    return affine(blocks[..., 2:].view(torch.int8), half(blocks, 0), None, dtype)


def q4_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f16 d, 16 bytes: low nibbles are elements 0-15, high nibbles 16-31."""
    q = unpack(blocks[..., 2:], 4).flatten(-2).view(torch.int8).sub_(8)
    return affine(q, half(blocks, 0), None, dtype)


def q4_1(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f16 d, f16 m, nibbles as in Q4_0."""
    return affine(unpack(blocks[..., 4:], 4).flatten(-2), half(blocks, 0), half(blocks, 2), dtype)


def q5_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f16 d, u32 whose bit i is the fifth bit of element i, nibbles as in Q4_0."""
    q = _five_bits(blocks[..., 2:6], blocks[..., 6:]).view(torch.int8).sub_(16)
    return affine(q, half(blocks, 0), None, dtype)


def q5_1(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """f16 d, f16 m, fifth bits and nibbles as in Q5_0."""
    return affine(_five_bits(blocks[..., 4:8], blocks[..., 8:]), half(blocks, 0), half(blocks, 2), dtype)


def _five_bits(high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    q = unpack(low, 4).flatten(-2)
    # bit i of byte j belongs to element 8 j + i
    q.unflatten(-1, (4, 8)).add_(unpack(high, 1).transpose(-1, -2), alpha=16)
    return q
