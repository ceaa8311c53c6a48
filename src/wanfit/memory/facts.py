"""The counters that an explanation needs, read when something has failed."""

from __future__ import annotations

import os

import torch

from ..vae.conv3d import trap_here
from .explanation import Facts
from .host import available_bytes, commit_room, in_wsl
from .nvml import open_gpu
from .record import MemoryRecord
from .versions import installed_version


def gather(device: torch.device, dtype: torch.dtype, record: MemoryRecord | None = None, *, stage: str = "") -> Facts:
    """What is known now. Must not fail: what cannot be read is left out.

    Args:
        dtype: of the VAE. record: of the run; its running or last stage is the one that failed.
        stage: where there is no record.
    """
    last = None if record is None else record.running or next(reversed(record.stages), None)
    planned = None if last is None or last.planned is None else last.planned.vram_needed
    free = total = None
    others: tuple[tuple[int, str, int], ...] = ()
    if device.type == "cuda":
        try:
            free, total = torch.cuda.mem_get_info(device)
        except RuntimeError:  # after a CUDA error nothing of the context may work
            free = total = None
        gpu, _ = open_gpu(None if free is None else device)
        if gpu is not None:
            if free is None:
                used, total = gpu.memory()
                free = total - used
            others = tuple(
                (process.pid, process.name, process.used or 0)
                for process in gpu.processes()
                if process.pid != os.getpid()
            )
    return Facts(
        stage=stage if last is None else last.name,
        planned_vram=planned,
        vram_free=free,
        vram_total=total,
        ram_free=available_bytes(),
        commit_free=commit_room(),
        conv3d_trap=trap_here(device, dtype),
        others=others,
        wsl=in_wsl(),
        aimdo=installed_version("comfy-aimdo"),
    )
