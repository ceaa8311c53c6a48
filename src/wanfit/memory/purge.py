"""Giving unused memory back. The only place in the tree that empties caches."""

from __future__ import annotations

import gc

import torch


def empty_device_cache(device: torch.device) -> None:
    """Collect garbage and return what PyTorch's allocator holds unused on `device` to the driver.

    Slow (it waits for the device): call it between stages, never inside a loop.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
