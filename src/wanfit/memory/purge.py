"""Giving unused memory back. The only place in the tree that empties caches.

Every part of the engine may import this module: it imports none of them. See `release` for scopes and a report.
"""

from __future__ import annotations

import ctypes
import gc
import sys

import torch


def empty_device_cache(device: torch.device) -> None:
    """Collect garbage and return what PyTorch's allocator holds unused on `device` to the driver.

    Slow (it waits for the device): call it between stages, never inside a loop.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def drop_cached_blocks() -> None:
    """After an out-of-memory error: return unused device memory, without waiting and without a collection."""
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def empty_host_cache() -> bool:
    """Return page-locked host memory that PyTorch keeps for later; False where this PyTorch cannot.

    Source: torch.accelerator (2.13); older versions have the private function only.
    """
    if not torch.cuda.is_initialized():
        return True
    accelerator, core = getattr(torch, "accelerator", None), getattr(torch, "_C", None)
    for owner, name in ((accelerator, "empty_host_cache"), (core, "_host_emptyCache")):
        empty = getattr(owner, name, None)
        if empty is not None:
            empty()
            return True
    return False


def trim_heap() -> bool:
    """Give freed pages of the C heap back to the system; False where there is no such call (Windows, musl)."""
    if not sys.platform.startswith("linux"):
        return False
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is None:
        return False
    trim(0)
    return True
