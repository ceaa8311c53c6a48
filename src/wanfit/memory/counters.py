"""The counters beyond the process's resident set: the driver's, the allocator's, the system's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from ..offload.host_memory import pinned_bytes
from .host import in_wsl, swap_in_use
from .nvml import Gpu, open_gpu


@dataclass(frozen=True)
class Reading:
    """Bytes; None where there is no such counter. See `record.Stage`."""

    device_used: int | None
    inactive: int | None
    pinned: int | None
    swap: int | None
    spilled: int | None


class Counters:
    """Reads them for one device.

    Attributes:
        unread: name -> why it is not read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._cuda = device.type == "cuda"
        self.unread: dict[str, str] = {}
        self._gpu: Gpu | None = None
        self._disk = _disk_counter(self.unread)
        if swap_in_use() is None:
            self.unread["swap"] = "the system's performance counters are switched off"
        if not self._cuda:
            self.unread["device_used"] = self.unread["inactive"] = self.unread["spilled"] = "no CUDA device is used"
            self.unread["pinned"] = "nothing is pinned without a CUDA device"
            return
        self._gpu, reason = open_gpu(device)
        if reason:
            self.unread["NVML"] = f"{reason}; device_used is what the CUDA runtime says"
        if sys.platform != "win32" and not in_wsl():  # WSL's device memory is Windows'
            self.unread["spilled"] = "only Windows moves device memory to RAM by itself"
        elif self._gpu is None:
            self.unread["spilled"] = "it takes NVML; see the Task Manager, GPU, shared GPU memory"
        if torch.cuda.get_allocator_backend() != "native":
            self.unread["inactive"] = f"the allocator {torch.cuda.get_allocator_backend()} does not tell"
        if not hasattr(torch.cuda, "host_memory_stats"):
            self.unread["PyTorch's pinned cache"] = f"torch {torch.__version__} has no host_memory_stats"

    def read(self) -> Reading:
        in_use = None if "swap" in self.unread else swap_in_use()
        swap = None if in_use is None else in_use[0]
        if not self._cuda:
            return Reading(None, None, None, swap, None)
        inactive = None
        if "inactive" not in self.unread:
            inactive = int(torch.cuda.memory_stats(self._device).get("inactive_split_bytes.all.current", 0))
        used = self._used()
        spilled = None
        if "spilled" not in self.unread:
            spilled = beyond_the_card(torch.cuda.memory_reserved(self._device), used)
        return Reading(used, inactive, pinned_bytes() + _torch_pinned(), swap, spilled)

    def disk_read(self) -> int | None:
        """Bytes that this process has read from disk so far, mapped files included; not what the page cache had."""
        return None if self._disk is None else int(self._disk().read_bytes)

    def _used(self) -> int:
        if self._gpu is not None:
            return self._gpu.memory()[0]
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def _disk_counter(unread: dict[str, str]) -> Callable[[], Any] | None:
    """What tells the bytes that this process has read from disk, where that is what the system counts."""
    if sys.platform == "win32":
        unread["disk_read"] = "Windows counts what is read by calls, from disk or not, and no mapped files"
        return None
    try:
        counter: Callable[[], Any] = psutil.Process().io_counters
        counter()
    except (AttributeError, psutil.Error) as error:
        unread["disk_read"] = f"this system does not tell what a process reads ({type(error).__name__})"
        return None
    return counter


def beyond_the_card(reserved: int, used: int) -> int:
    """What of PyTorch's device memory cannot be on the card, where all processes together use less: the least that
    Windows has moved to RAM (shared GPU memory)."""
    return max(0, reserved - used)


def _torch_pinned() -> int:
    """What PyTorch's own pinned allocator has taken, in use or kept for later."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
