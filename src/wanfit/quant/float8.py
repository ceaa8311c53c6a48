"""Plain floats, scaled float8 and mxfp8.

Sources: the file formats of ComfyUI (facts only); comfy-kitchen comfy_kitchen/float_utils.py and
backends/eager/quantization.py 0.2.40, Apache-2.0 (mxfp8).
"""

from __future__ import annotations

import torch

from .bits import affine
from .scales import broadcast_scale, padded_matrix, unblocked
from .weight import StoredWeight


def plain(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """A cast; the stored tensor itself when it has the dtype already."""
    return weight.data.to(dtype)


def scaled_float8(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """value * scale (params `scale`: one number, or one for each row); without a scale the value."""
    if "scale" not in weight.params:
        return weight.data.to(dtype)
    return affine(weight.data, broadcast_scale(weight, weight.params["scale"]), None, dtype)


def mxfp8(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """e4m3 * 2^(e - 127) with one exponent byte for 32 columns; an exponent of 0 means zero.

    Data is e4m3, padded to a multiple of 32 columns (and rows); `scale` holds the exponent bytes,
    (rows, columns / 32) in the cuBLAS block order.
    """
    rows, columns = padded_matrix(weight, 32, 32)
    exponent = unblocked(weight, rows, columns // 32)
    scale = (exponent.to(torch.int32) << 23).view(torch.float32)
    value = affine(weight.data.unflatten(-1, (-1, 32)), scale.unsqueeze(-1), None, dtype).flatten(-2)
    return value[: weight.shape[0], : weight.shape[1]]
