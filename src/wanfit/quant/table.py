"""The table of stored formats: how each becomes a float tensor."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping

import torch

from ..errors import QuantError
from . import gguf_iq, gguf_k, gguf_legacy
from .bits import damaged
from .float8 import mxfp8, plain, scaled_float8
from .int8 import scaled_int8
from .nvfp4 import nvfp4
from .triton_support import fused_blocks
from .weight import StoredWeight

Dequantizer = Callable[[StoredWeight, torch.dtype], torch.Tensor]


def _typed(decode: Dequantizer, stored: torch.dtype) -> Dequantizer:
    """A format whose data is a tensor of the logical shape, of one dtype."""

    @functools.wraps(decode)
    def checked(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
        if tuple(weight.data.shape) != weight.shape or weight.data.dtype != stored:
            found = f"{tuple(weight.data.shape)} {weight.data.dtype}"
            raise damaged(f"A {weight.format} tensor of shape {weight.shape} stores {found}")
        return decode(weight, dtype)

    return checked


def _blocks(
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor], elements: int, block_bytes: int
) -> Dequantizer:
    """A GGUF type: rows of blocks, each of so many elements in so many bytes."""

    @functools.wraps(decode)
    def by_rows(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
        rows, columns = math.prod(weight.shape[:-1]), weight.shape[-1]
        data = weight.data
        if columns % elements:
            raise damaged(f"{columns} columns are no whole number of {weight.format} blocks of {elements}")
        if data.dtype != torch.uint8 or tuple(data.shape) != (rows, columns // elements * block_bytes):
            raise damaged(f"A {weight.format} tensor of shape {weight.shape} stores {tuple(data.shape)} {data.dtype}")
        data = data if data.stride(-1) == 1 else data.contiguous()
        fused = fused_blocks(data, weight.format, dtype)
        if fused is not None:
            return fused.view(weight.shape)
        return decode(data.unflatten(-1, (-1, block_bytes)), dtype).reshape(weight.shape)

    return by_rows


FORMATS: Mapping[str, Dequantizer] = {
    "f32": _typed(plain, torch.float32),
    "f16": _typed(plain, torch.float16),
    "bf16": _typed(plain, torch.bfloat16),
    "f8_e4m3": _typed(scaled_float8, torch.float8_e4m3fn),
    "f8_e5m2": _typed(scaled_float8, torch.float8_e5m2),
    "int8": _typed(scaled_int8, torch.int8),
    "mxfp8": mxfp8,
    "nvfp4": nvfp4,
    "q8_0": _blocks(gguf_legacy.q8_0, 32, 34),
    "q5_1": _blocks(gguf_legacy.q5_1, 32, 24),
    "q5_0": _blocks(gguf_legacy.q5_0, 32, 22),
    "q4_1": _blocks(gguf_legacy.q4_1, 32, 20),
    "q4_0": _blocks(gguf_legacy.q4_0, 32, 18),
    "q6_k": _blocks(gguf_k.q6_k, 256, 210),
    "q5_k": _blocks(gguf_k.q5_k, 256, 176),
    "q4_k": _blocks(gguf_k.q4_k, 256, 144),
    "q3_k": _blocks(gguf_k.q3_k, 256, 110),
    "q2_k": _blocks(gguf_k.q2_k, 256, 84),
    "iq4_xs": _blocks(gguf_iq.iq4_xs, 256, 136),
    "iq4_nl": _blocks(gguf_iq.iq4_nl, 32, 18),
}

# Formats that exist in files and that WanFit does not compute with.
_GGUF_ONLY = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "q8_1", "q8_k", "tq1_0", "tq2_0")
_COMFY_ONLY = ("convrot_w4a4", "asym_w4a8_int8", "awq_w4a16", "svdquant_w4a4")
_KNOWN_ONLY = frozenset((*_GGUF_ONLY, "mxfp4", *_COMFY_ONLY))


def check_format(name: str, stage: str = "inspect") -> None:
    """Raises: QuantError: format_unsupported or format_unknown, when `name` is no key of FORMATS."""
    if name in FORMATS:
        return
    change = "Use the fp8_scaled file or a GGUF file (Q8_0, Q6_K, Q5_K, Q4_K ...)"
    if name in _KNOWN_ONLY:
        raise QuantError("format_unsupported", stage, f"The file stores weights as {name}", change)
    raise QuantError("format_unknown", stage, f"The file stores weights as {name!r}", change)


def dequantize(weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """The tensor in its logical shape, on the weight's device, in `dtype`.

    Values are computed in float32 and rounded once. The result may be the stored tensor itself (a plain float
    format of that dtype): do not write to it.

    Raises:
        QuantError: the format is not supported or not known, a scale is missing, the bytes do not match the shape.
    Memory: tests/unit/quant/test_cost.py holds the peak of every format, in bytes an element.
    """
    check_format(weight.format, "load")
    if 0 in weight.shape:
        raise damaged(f"A {weight.format} tensor has the shape {weight.shape}")
    return FORMATS[weight.format](weight, dtype)


def gather_rows(weight: StoredWeight, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rows that `index` names, dequantised; no other row is.

    Args:
        weight: a matrix.
        index: integers of any shape, in [0, rows).
    Returns: (*index.shape, columns) on the weight's device.
    """
    check_format(weight.format, "load")
    if len(weight.shape) != 2 or weight.format in ("mxfp8", "nvfp4"):
        raise QuantError(
            "format_unsupported",
            "load",
            f"Rows of a {weight.format} tensor of shape {weight.shape} were asked for",
            "Use a text encoder in fp8_scaled, 16 bit or GGUF",
        )
    rows = index.to(weight.data.device).flatten()
    shape = (*index.shape, weight.shape[1])
    if not len(rows):
        return torch.empty(shape, dtype=dtype, device=weight.data.device)
    # float8 has no index_select on every device: select its bytes
    raw = weight.data.view(torch.uint8) if weight.data.element_size() == 1 else weight.data
    data = raw.index_select(0, rows).view(weight.data.dtype)
    params = {
        role: tensor.reshape(-1).index_select(0, rows) if tensor.numel() == weight.shape[0] > 1 else tensor
        for role, tensor in weight.params.items()
    }
    chosen = dataclasses.replace(weight, shape=(len(rows), weight.shape[1]), data=data, params=params)
    return dequantize(chosen, dtype).reshape(shape)
