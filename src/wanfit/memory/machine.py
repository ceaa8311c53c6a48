"""The machine that a plan is made for: this one, or one that is only described."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

from ..errors import InputError
from ..offload import Policy
from ..quant.float8_matmul import float8_units
from ..quant.triton_support import triton_refusal
from .device import RESERVE_BYTES, free_bytes
from .host import available_bytes, commit_room

GIB = 2**30

CONTEXT_BYTES = GIB // 2
"""What CUDA itself takes on a card before the first tensor: 0.4 to 0.6 GiB, by driver and card."""

SYSTEM_RAM = 2 * GIB
"""Left to the system and other programs where only the installed RAM is known."""

PROCESS_RAM = {"cpu": GIB, "cuda": 2 * GIB}
"""Python, PyTorch and the libraries, with CUDA's on a card."""

RAM_SHARE = 0.6
"""Of the host memory that is free, what the blocks of both experts may take; the rest stays for frames and others."""

Text = Literal["cpu", "stream"]


@dataclass(frozen=True)
class Speeds:
    """What transfers and computation were measured at, or are stated to be.

    Args:
        bandwidth: bytes a second from host memory to the device.
        block_seconds: one block's forward at the size planned for; None: unknown.
        disk: bytes a second from the model's disk; None: unknown.
    """

    bandwidth: float
    block_seconds: float | None = None
    disk: float | None = None


@dataclass(frozen=True)
class Machine:
    """Memory and abilities; bytes.

    Args:
        device: `cpu` or `cuda`.
        vram: that tensors of the run may take; 0 on the CPU.
        ram: that the run may take without swapping, the process as it is now not counted.
        vram_taken, ram_taken: what else is on the card and in RAM, by cause, for the report.
        dtype, vae_dtype: compute precisions.
        text: where the text encoder runs.
        float8: the card multiplies float8 itself. fused: Triton kernels work.
        policy: of the blocks, see `offload.BlockStore`.
        ram_budget: for blocks on the host.
        commit: what the system still promises in all (Windows: RAM and page file, where device memory counts too);
            None without such a limit.
    """

    device: Literal["cpu", "cuda"]
    vram: int
    ram: int
    dtype: torch.dtype = torch.bfloat16
    vae_dtype: torch.dtype = torch.bfloat16
    text: Text = "stream"
    float8: bool = False
    fused: bool = False
    policy: Policy = "auto"
    ram_budget: int = 0
    commit: int | None = None
    speeds: Speeds | None = None
    vram_taken: Mapping[str, int] = field(default_factory=dict[str, int])
    ram_taken: Mapping[str, int] = field(default_factory=dict[str, int])


def stated_machine(
    vram_gib: float,
    ram_gib: float,
    *,
    used_gib: float = 0.0,
    capability: tuple[int, int] | None = None,
    policy: Policy = "auto",
    speeds: Speeds | None = None,
) -> Machine:
    """A card and RAM of these sizes, with a usual system around them.

    Args:
        vram_gib: of the whole card; 0 plans for the CPU.
        used_gib: of the card, by the desktop and other programs.
        capability: of the card, for what it can compute with; None takes the older way, which needs more memory.

    Raises:
        InputError: number_invalid.
    """
    for name, value, low, high in (
        ("vram", vram_gib, 0.0, 1024.0),
        ("ram", ram_gib, 1.0, 65536.0),
        ("vram_used", used_gib, 0.0, 1024.0),
    ):
        if not low <= value <= high:  # also NaN
            raise InputError("number_invalid", "plan", f"<{name}> is {value} GiB", f"Use {low:g} to {high:g}")
    if vram_gib and used_gib >= vram_gib:
        raise InputError(
            "number_invalid",
            "plan",
            f"<vram_used> is {used_gib} GiB of a card with {vram_gib} GiB",
            "Use less than the card has",
        )
    device = "cuda" if vram_gib else "cpu"
    vram_taken = (
        {"CUDA context": CONTEXT_BYTES, "other programs": int(used_gib * GIB), "reserve": RESERVE_BYTES}
        if vram_gib
        else {}
    )
    ram_taken = {"system": SYSTEM_RAM, "Python and PyTorch": PROCESS_RAM[device]}
    ram = max(0, int(ram_gib * GIB) - sum(ram_taken.values()))
    dtype = torch.bfloat16 if device == "cuda" and (capability is None or capability >= (8, 0)) else torch.float16
    return Machine(
        device=device,
        vram=max(0, int(vram_gib * GIB) - sum(vram_taken.values())),
        ram=ram,
        dtype=dtype if device == "cuda" else torch.float32,
        vae_dtype=dtype if device == "cuda" else torch.float32,
        text="stream" if device == "cuda" else "cpu",
        float8=capability is not None and capability >= (8, 9),
        policy=policy,
        ram_budget=int(ram * RAM_SHARE),
        speeds=speeds,
        vram_taken={cause: nbytes for cause, nbytes in vram_taken.items() if nbytes},
        ram_taken=ram_taken,
    )


def this_machine(
    device: torch.device,
    dtype: torch.dtype,
    vae_dtype: torch.dtype,
    *,
    text: Text = "stream",
    policy: Policy = "auto",
    vram_budget: int | None = None,
    ram_budget: int | None = None,
) -> Machine:
    """What is free here and now. On a CUDA device this makes the context, so that it is counted.

    Args:
        vram_budget: bytes of device memory to stay within, instead of what is free.
        ram_budget: bytes of host memory for blocks, instead of a share of what is free.
    """
    room = available_bytes()
    cuda = device.type == "cuda"
    vram = (free_bytes(device) if vram_budget is None else vram_budget) if cuda else 0
    return Machine(
        device="cuda" if cuda else "cpu",
        vram=vram,
        ram=room,
        dtype=dtype,
        vae_dtype=vae_dtype,
        text=text,
        float8=float8_units(device),
        fused=cuda and triton_refusal(device) is None,
        policy=policy,
        ram_budget=int(room * RAM_SHARE) if ram_budget is None else ram_budget,
        commit=commit_room(),
        vram_taken={"reserve": RESERVE_BYTES} if cuda and vram_budget is None else {},
    )
