"""The counters beyond the process's resident set: the driver's, the allocator's, the system's."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from ..offload.host_memory import pinned_bytes
from .nvml import Gpu, open_gpu


@dataclass(frozen=True)
class Reading:
    """Bytes; None where there is no such counter. See `record.Stage`."""

    device_used: int | None
    inactive: int | None
    pinned: int | None
    swap: int | None


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
        if not self._cuda:
            self.unread["device_used"] = self.unread["inactive"] = "no CUDA device is used"
            self.unread["pinned"] = "nothing is pinned without a CUDA device"
            return
        self._gpu, reason = open_gpu(device)
        if reason:
            self.unread["NVML"] = f"{reason}; device_used is what the CUDA runtime says"
        if torch.cuda.get_allocator_backend() != "native":
            self.unread["inactive"] = f"the allocator {torch.cuda.get_allocator_backend()} does not tell"
        if not hasattr(torch.cuda, "host_memory_stats"):
            self.unread["PyTorch's pinned cache"] = f"torch {torch.__version__} has no host_memory_stats"

    def read(self) -> Reading:
        swap = psutil.swap_memory().used
        if not self._cuda:
            return Reading(None, None, None, swap)
        inactive = None
        if "inactive" not in self.unread:
            inactive = int(torch.cuda.memory_stats(self._device).get("inactive_split_bytes.all.current", 0))
        return Reading(self._used(), inactive, pinned_bytes() + _torch_pinned(), swap)

    def _used(self) -> int:
        if self._gpu is not None:
            return self._gpu.memory()[0]
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free


def _torch_pinned() -> int:
    """What PyTorch's own pinned allocator has taken, in use or kept for later."""
    if not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))
