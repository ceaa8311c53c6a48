"""Where and in which precision a run computes, chosen by what the device can do."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import InputError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Placement:
    """Devices, precisions and the chunk size of one run. `text` is `cpu` or `stream` (through the device)."""

    device: torch.device
    dtype: torch.dtype
    vae_dtype: torch.dtype
    text: str
    chunk_tokens: int


def choose_placement(
    device: str = "auto",
    dtype: str = "auto",
    vae_dtype: str = "auto",
    text: str = "auto",
    chunk_tokens: int = 4096,
) -> Placement:
    """Decide what is left at `auto`.

    CUDA from compute capability 8.0 computes in bfloat16, older cards in float16 (they emulate bfloat16
    slowly), the CPU in float32. The text encoder is streamed through a CUDA device and runs in place on the CPU.
    Raises: InputError: no such device, unknown precision.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        target = torch.device(device)
    except RuntimeError as error:
        raise InputError("number_invalid", "input", f"<device> is {device!r}", "Use cpu, cuda or cuda:0") from error
    if target.type not in {"cpu", "cuda"}:
        raise InputError("number_invalid", "input", f"<device> is {device!r}", "Use cpu, cuda or cuda:0")
    if target.type == "cuda":
        count = torch.cuda.device_count()
        if (target.index or 0) >= count:
            raise InputError(
                "number_invalid", "input", f"<device> is {device!r}, and this PyTorch sees {count} CUDA devices"
            )
        target = torch.device("cuda", target.index or 0)
    if chunk_tokens < 1:
        raise InputError("number_invalid", "input", f"<chunk_tokens> is {chunk_tokens}", "Use 1 or more")
    compute = _dtype("dtype", dtype, target)
    return Placement(
        target,
        compute,
        _dtype("vae_dtype", vae_dtype, target),
        ("cpu" if target.type == "cpu" else "stream") if text == "auto" else text,
        chunk_tokens,
    )


def _dtype(name: str, value: str, device: torch.device) -> torch.dtype:
    if value == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if value not in DTYPES:
        raise InputError("number_invalid", "input", f"<{name}> is {value!r}", f"Use auto, {', '.join(DTYPES)}")
    return DTYPES[value]
