"""What an explanation is made from, and what it says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Facts:
    """What was known when it failed; None where it was not.

    Args:
        stage: of the run.
        planned_vram: bytes that the plan said this stage needs.
        vram_free, vram_total: of the device. ram_free: of the host. commit_free: what the system still promises in all.
        conv3d_trap: what `vae.conv3d.trap_here` says of this PyTorch.
        others: (process id, name, bytes) of other programs on the device.
        wsl: runs inside WSL. aimdo: version of ComfyUI's memory manager.
    """

    stage: str = ""
    planned_vram: int | None = None
    vram_free: int | None = None
    vram_total: int | None = None
    ram_free: int | None = None
    commit_free: int | None = None
    conv3d_trap: str = ""
    others: tuple[tuple[int, str, int], ...] = ()
    wsl: bool = False
    aimdo: str = ""


@dataclass(frozen=True)
class Explanation:
    """One cause and one next step; inputs in angle brackets, as in `wanfit.errors`.

    Args:
        cause: a short fixed word for programs: `vram full`, `host memory full`, `fragmentation` ...
        what: one sentence with numbers.
        change: one next step.
    """

    cause: str
    what: str
    change: str

    def __str__(self) -> str:
        return f"{self.what}. {self.change}."
