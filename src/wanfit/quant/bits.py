"""Packed fields and the one multiplication that every dequantiser ends in.

All of it is element-wise torch over whole tensors: the number of kernels does not depend on the size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

from ..errors import QuantError

_SLICES = 8


def unpack(packed: torch.Tensor, width: int) -> torch.Tensor:
    """Split bytes into fields of `width` bits, the lowest first: uint8 (..., n) -> (..., 8 // width, n)."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=packed.device).unsqueeze(-1)
    return (packed.unsqueeze(-2) >> shifts).bitwise_and_((1 << width) - 1)


def half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block: uint8 (..., bytes) -> float32 (..., 1)."""
    # The copy aligns the two bytes and makes them contiguous, whatever the strides of the blocks.
    two = blocks[..., at : at + 2].clone(memory_format=torch.contiguous_format)
    return two.view(torch.float16).to(torch.float32)


def affine(q: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """`q * scale + offset`, computed in float32 and rounded once to `dtype`.

    Args:
        q: integers, float8, or float32 that may be overwritten, (..., n).
        scale, offset: float32, broadcastable to q.
    Memory: on CUDA the result alone, because the kernels cast as they load and store. Elsewhere torch casts whole
        tensors first, so a fixed number of slices bounds that copy to half a byte an element.
    """
    if q.is_cuda:
        # A scale without dimensions would be rounded to the dtype of the other operand first.
        scale = scale.reshape(1) if scale.ndim == 0 else scale
        result = torch.empty(q.shape, dtype=dtype, device=q.device)
        if q.is_floating_point() and q.element_size() == 1:
            q = result.copy_(q)  # float8 takes no part in type promotion; every dtype holds its values
        if offset is None:
            return torch.mul(q, scale, out=result)
        return torch.addcmul(offset, q, scale, out=result)
    result = torch.empty(q.shape, dtype=dtype, device=q.device)
    factors = [q, scale.expand(q.shape)] if offset is None else [q, scale.expand(q.shape), offset.expand(q.shape)]
    for target, *parts in zip(result.chunk(_SLICES), *(factor.chunk(_SLICES) for factor in factors), strict=True):
        value = parts[0].to(torch.float32).mul_(parts[1])
        target.copy_(value if offset is None else value.add_(parts[2]))
    return result


def pair_table(codebook: Sequence[int], device: torch.device, *, high_first: bool) -> torch.Tensor:
    """For each of the 256 bytes the two int8 code values of its nibbles, as one int16 (256,)."""
    return _pair_table(tuple(codebook), device, high_first)


@functools.lru_cache(maxsize=32)  # 512 bytes each: one for a codebook and device
def _pair_table(codebook: tuple[int, ...], device: torch.device, high_first: bool) -> torch.Tensor:
    pairs = [(codebook[byte & 15], codebook[byte >> 4]) for byte in range(256)]
    rows = [(high, low) if high_first else (low, high) for low, high in pairs]
    with torch.inference_mode(False):  # the cached tensor must also serve calls outside inference mode
        return torch.tensor(rows, dtype=torch.int8).view(torch.int16).flatten().to(device)


def look_up(packed: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Both code values of every byte: uint8 (..., n) -> int8 (..., n, 2), through a `pair_table`."""
    index = packed.to(torch.int32, memory_format=torch.contiguous_format).flatten()
    return table.index_select(0, index).view(torch.int8).view(*packed.shape, 2)


def damaged(what: str) -> QuantError:
    """The error for stored bytes or scales that do not match the tensor's shape."""
    return QuantError("file_damaged", "load", what, "Download the file again, or take another one")
