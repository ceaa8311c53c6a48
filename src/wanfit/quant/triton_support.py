"""Whether Triton works here."""

from __future__ import annotations

import functools
import importlib.util

import torch


@functools.lru_cache(maxsize=16)
def triton_refusal(device: torch.device) -> str | None:
    """Why Triton kernels do not run on this device; None when they do. Tried with one small kernel."""
    if device.type != "cuda":
        return f"no Triton kernels on {device.type}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        from .gguf_triton import dequantize_blocks

        probe = torch.zeros(34 * 8, dtype=torch.uint8, device=device)
        probe.view(torch.float16)[::17] = 2.0
        probe.view(8, 34)[:, 2:] = 3
        worked = bool((dequantize_blocks(probe, "q8_0", torch.float32) == 6.0).all())
    except Exception as error:  # noqa: BLE001  a compiler, a driver and a cache on disk are behind this call
        return f"Triton does not work here: {type(error).__name__}: {str(error)[:200]}"
    return None if worked else "Triton gives wrong results here"


def fused_blocks(data: torch.Tensor, format: str, dtype: torch.dtype) -> torch.Tensor | None:
    """The elements of GGUF blocks by a fused kernel; None where there is none for them.

    Args:
        data: uint8 (rows, row_bytes).
    """
    if not data.is_cuda or data.data_ptr() % 2 or not data.is_contiguous() or triton_refusal(data.device):
        return None
    from .gguf_triton import FORMATS, dequantize_blocks

    return dequantize_blocks(data, format, dtype) if format in FORMATS else None
