"""What RAM and VRAM hold right now."""

from __future__ import annotations

from dataclasses import dataclass

import comfy.model_management
import psutil
import torch

from ...src.wanfit.memory.record import gib


@dataclass(frozen=True)
class Snapshot:
    """Bytes; None where there is no CUDA device."""

    rss: int
    allocated: int | None
    reserved: int | None
    free: int | None
    models: tuple[str, ...]

    def line(self) -> str:
        """One line for people."""
        parts = [f"RAM {gib(self.rss)}"]
        if self.allocated is not None:
            parts.append(f"VRAM allocated {gib(self.allocated)}, reserved {gib(self.reserved)}, free {gib(self.free)}")
        parts.append(f"loaded models: {', '.join(self.models) or 'none'}")
        return "; ".join(parts)


def take() -> Snapshot:
    """The state at this moment."""
    device = comfy.model_management.get_torch_device()
    loaded = [entry.model for entry in comfy.model_management.current_loaded_models]
    models = tuple(type(patcher.model).__name__ for patcher in loaded if patcher is not None)
    rss = psutil.Process().memory_info().rss
    if device.type != "cuda":
        return Snapshot(rss, None, None, None, models)
    free = int(torch.cuda.mem_get_info(device)[0])
    return Snapshot(rss, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device), free, models)
