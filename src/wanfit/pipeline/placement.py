"""Where and in which precision a run computes, chosen by what the device can do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast, get_args

import torch

from ..blocks import ATTENTION, choose_attention
from ..errors import InputError
from ..offload import Policy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TEXT = ("auto", "cpu", "stream")


@dataclass(frozen=True)
class Placement:
    """Devices, precisions and memory of one run.

    Args:
        text: `cpu`, or `stream` through the device.
        float8_matmul: see `ForwardSettings`.
        attention: a name of `blocks.ATTENTION`.
        policy: of the transformer's blocks, see `BlockStore`.
        vram_budget: bytes of device memory for the denoising; None for what is free.
        ram_budget: bytes of host memory for the blocks; None for a share of what is free.
    """

    device: torch.device
    dtype: torch.dtype
    vae_dtype: torch.dtype
    text: str
    chunk_tokens: int
    float8_matmul: bool | None
    attention: str
    policy: Policy
    vram_budget: int | None
    ram_budget: int | None


def choose_placement(
    device: str = "auto",
    dtype: str = "auto",
    vae_dtype: str = "auto",
    text: str = "auto",
    chunk_tokens: int = 4096,
    fp8_matmul: bool = True,
    attention: str = "auto",
    policy: str = "auto",
    vram_budget_gib: float | None = None,
    ram_budget_gib: float | None = None,
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
                "number_invalid",
                "input",
                f"<device> is {device!r}, and this PyTorch sees {count} CUDA devices",
                f"Use {', '.join(['cpu', *(f'cuda:{index}' for index in range(count))])}; <doctor> says why",
            )
        target = torch.device("cuda", target.index or 0)
    if chunk_tokens < 1:
        raise InputError("number_invalid", "input", f"<chunk_tokens> is {chunk_tokens}", "Use 1 or more")
    if text not in TEXT:
        raise InputError("number_invalid", "input", f"<text> is {text!r}", f"Use one of: {', '.join(TEXT)}")
    compute = _dtype("dtype", dtype, target)
    return Placement(
        target,
        compute,
        _dtype("vae_dtype", vae_dtype, target),
        ("cpu" if target.type == "cpu" else "stream") if text == "auto" else text,
        chunk_tokens,
        None if fp8_matmul else False,
        _attention(attention, target),
        _policy(policy),
        _bytes("vram_budget", vram_budget_gib),
        _bytes("ram_budget", ram_budget_gib),
    )


def _attention(value: str, device: torch.device) -> str:
    if device.type != "cuda" or value not in ATTENTION:
        choose_attention(value, device, torch.float32, 128, 1)  # names what cannot be before anything is read
    return value


def _policy(value: str) -> Policy:
    policies = get_args(Policy)
    if value not in policies:
        raise InputError("number_invalid", "input", f"<policy> is {value!r}", f"Use one of: {', '.join(policies)}")
    return cast(Policy, value)


def _bytes(name: str, gib: float | None) -> int | None:
    if gib is None:
        return None
    if not (math.isfinite(gib) and gib > 0):
        raise InputError("number_invalid", "input", f"<{name}> is {gib} GiB", "Use a number above 0")
    return int(gib * 2**30)


def _dtype(name: str, value: str, device: torch.device) -> torch.dtype:
    if value == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if value not in DTYPES:
        raise InputError("number_invalid", "input", f"<{name}> is {value!r}", f"Use auto, {', '.join(DTYPES)}")
    return DTYPES[value]
