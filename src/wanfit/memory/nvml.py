"""What the driver says about a card, through NVML: memory of all processes, and who they are. Read-only."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch


@dataclass(frozen=True)
class GpuProcess:
    """One process with memory on the card; `used` is None where the system hides it (Windows)."""

    pid: int
    name: str
    used: int | None


class Gpu:
    """One card. Use `open_gpu`."""

    def __init__(self, library: ModuleType, handle: Any) -> None:
        self._library, self._handle = library, handle

    def memory(self) -> tuple[int, int]:
        """(used by all processes, total), bytes."""
        info: Any = self._library.nvmlDeviceGetMemoryInfo(self._handle)
        return int(info.used), int(info.total)

    def driver(self) -> str:
        return str(self._library.nvmlSystemGetDriverVersion())

    def name(self) -> str:
        return str(self._library.nvmlDeviceGetName(self._handle))

    def processes(self) -> list[GpuProcess]:
        """With compute or graphics contexts, those with most memory first; none where the system lists none (WSL)."""
        found: dict[int, GpuProcess] = {}
        for kind in ("Compute", "Graphics"):
            try:
                listed: Any = getattr(self._library, f"nvmlDeviceGet{kind}RunningProcesses")(self._handle)
            except self._library.NVMLError:
                continue
            for process in listed:
                used = process.usedGpuMemory
                found[process.pid] = GpuProcess(process.pid, self._process_name(process.pid), used and int(used))
        return sorted(found.values(), key=lambda process: -(process.used or 0))

    def _process_name(self, pid: int) -> str:
        try:
            name = self._library.nvmlSystemGetProcessName(pid)
        except self._library.NVMLError:
            return "unknown"
        return name if isinstance(name, str) else bytes(name).decode(errors="replace")


def open_gpu(device: torch.device | None = None) -> tuple[Gpu | None, str]:
    """A card through NVML, or None and the reason.

    Args:
        device: a CUDA device of this process; NVML counts cards on its own (CUDA_VISIBLE_DEVICES), so it is found by
            its UUID. None: NVML's first card.
    """
    try:
        import pynvml
    except ImportError:
        return None, "nvidia-ml-py is not installed"
    try:
        pynvml.nvmlInit()
        if device is None:
            gpu = Gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(0))
        else:
            uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
            if uuid is None:
                return None, "this PyTorch does not tell a card's UUID"
            gpu = Gpu(pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}"))
        gpu.memory()  # not told of cards without memory of their own
        return gpu, ""
    except pynvml.NVMLError as error:
        return None, f"NVML: {error}"
