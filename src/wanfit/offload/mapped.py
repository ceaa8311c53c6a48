"""Blocks read straight from the memory-mapped file, one at a time, each time they are needed."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import torch

from ..checkpoint import Checkpoint
from ..quant import StoredWeight


class MappedBlocks:
    """A `WeightSource` over a checkpoint: nothing is kept between two blocks.

    On the CPU the weights are views of the map, so no copy is made and the system may drop the pages at any
    time; on a device each block is copied in its stored bytes and released after its forward.

    Memory: one block in its stored bytes on the device; no host memory of its own.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._names: dict[int, dict[str, str]] = {}
        for name in checkpoint.tensors:
            if name.startswith("blocks."):
                _, index, key = name.split(".", 2)
                self._names.setdefault(int(index), {})[key] = name

    @contextmanager
    def onload(self, index: int) -> Generator[Mapping[str, StoredWeight]]:
        """Block `index`'s weights on the device for the time of the `with`."""
        names = self._names[index]
        weights = {key: self._checkpoint.load(name).to(self._device) for key, name in names.items()}
        yield weights
        weights.clear()
