"""What a device has left."""

from __future__ import annotations

import torch

RESERVE_BYTES = 512 * 2**20
"""Left alone on the device: the context's growth, libraries' workspaces, the allocator's rounding."""


def free_bytes(device: torch.device) -> int:
    """Bytes that this process can still take on a CUDA device, less `RESERVE_BYTES`; its own unused cache counts."""
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(0, free + cached - RESERVE_BYTES)
