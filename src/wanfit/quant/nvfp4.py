"""nvfp4: 4-bit floats with one e4m3 scale for 16 columns and one float32 scale for the tensor.

Source: comfy-kitchen comfy_kitchen/float_utils.py and backends/eager/quantization.py 0.2.40, Apache-2.0.
"""

from __future__ import annotations

import torch

from ..errors import QuantError
from .bits import affine, look_up, pair_table
from .scales import padded_matrix, require, unblocked
from .weight import StoredWeight

_DOUBLED_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def nvfp4(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """e2m1 * `scale` * `scale_2`; the high nibble is the even column.

    Data is uint8 (rows, columns / 2), padded to a multiple of 16 columns (and rows); `scale` holds e4m3 bytes,
    (rows, columns / 16) in the cuBLAS block order; `scale_2` is one float32. A stored -0 becomes +0.
    """
    if "pre_quant_scale" in weight.params:
        raise QuantError(
            "format_unsupported",
            "load",
            "nvfp4 with a `pre_quant_scale` on the layer's input",
            "Use the fp8_scaled file or a GGUF file",
        )
    rows, columns = padded_matrix(weight, 16, 8)
    block = unblocked(weight, rows, columns // 16).contiguous().view(torch.float8_e4m3fn)
    scale = block.to(torch.float32) * require(weight, "scale_2").to(torch.float32).reshape(1, 1) * 0.5
    table = pair_table(_DOUBLED_E2M1, weight.data.device, high_first=True)
    q = look_up(weight.data, table).view(rows, -1, 16)
    value = affine(q, scale.unsqueeze(-1), None, dtype).flatten(-2)
    return value[: weight.shape[0], : weight.shape[1]]
