"""int8 with one scale, or one a row, and optionally a rotation of the columns (ConvRot).

Source: comfy-kitchen comfy_kitchen/tensor/int8_utils.py and backends/eager/quantization.py 0.2.40, Apache-2.0.
"""

from __future__ import annotations

import functools
import math

import torch

from ..errors import QuantError
from .bits import affine
from .scales import broadcast_scale, require
from .weight import StoredWeight


def scaled_int8(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """int8 * scale; with the option `convrot_groupsize` rotated back into the original basis.

    Memory: with a rotation 8 bytes an element besides the result.
    """
    scale = broadcast_scale(weight, require(weight, "scale"))
    if "convrot_groupsize" not in weight.options:
        return affine(weight.data, scale, None, dtype)
    size = int(weight.options["convrot_groupsize"])
    columns = weight.shape[-1]
    if size < 4 or 4 ** round(math.log(size, 4)) != size or columns % size:
        raise QuantError(
            "format_unsupported",
            "load",
            f"int8 rotated in groups of {size} columns, of a tensor of shape {weight.shape}: "
            "a group must be a power of 4 and divide the columns",
            "Use the fp8_scaled file or a GGUF file",
        )
    # The stored matrix is W @ H within each group; H = S / sqrt(size) is symmetric and its own inverse. S holds only
    # +1 and -1, so the product with it is a sum of integers below 2^24: exact, also where the matmul runs in TF32.
    signs = _rotation(size, weight.data.device)
    rotated = weight.data.to(torch.float32).unflatten(-1, (-1, size)) @ signs
    return affine(rotated.flatten(-2), scale / math.sqrt(size), None, dtype)


@functools.lru_cache(maxsize=8)  # 256 KiB for the group size in use, once a device
def _rotation(size: int, device: torch.device) -> torch.Tensor:
    """The regular Hadamard matrix of that size, unscaled: Kronecker powers of a 4 x 4 one."""
    with torch.inference_mode(False):
        base = torch.ones(4, 4) - 2 * torch.eye(4).flip(0)
        signs = torch.ones(1, 1)
        while len(signs) < size:
            signs = torch.kron(signs, base)
        return signs.to(device)
