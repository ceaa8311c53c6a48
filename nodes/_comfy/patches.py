"""The LoRAs of the clone that samples, on the device it samples on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...src.wanfit.blocks import BlockPatches
from ...src.wanfit.memory.demand import RING
from ...src.wanfit.offload import PatchStore
from . import lora


class CurrentPatches:
    """What ComfyUI's LoRA loaders put on a clone, by block: collected once for each set, kept until another comes.

    Args:
        shapes: of all block tensors, by canonical name.
        dtype: compute dtype.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        self._shapes, self._dtype = shapes, dtype
        self._collected: tuple[Any, dict[int, BlockPatches]] = (None, {})
        self._store: tuple[Any, PatchStore] | None = None

    def of(self, clone: Any) -> dict[int, BlockPatches]:
        """Of `clone`, a model patcher or none."""
        if clone is None:
            return {}
        if self._collected[0] != clone.patches_uuid:
            self._collected = (clone.patches_uuid, lora.collect(clone.patches, self._shapes))
        return self._collected[1]

    def nbytes(self, clone: Any, *, keep: bool) -> int:
        """On the device: of all blocks if they stay there, or of those that are there at a time."""
        sizes = sorted((block.nbytes(self._dtype) for block in self.of(clone).values()), reverse=True)
        return sum(sizes if keep else sizes[:RING])

    def on(self, clone: Any, device: torch.device, *, keep: bool) -> PatchStore:
        """Files stay where they are when only a strength has changed."""
        patches = self.of(clone)
        key = (self._collected[0], device)
        if self._store is not None and self._store[0] != key:
            before, store = self._store
            same = before[1] == device and store.take_strengths(patches)
            if not same:
                store.close()
            self._store = (key, store) if same else None
        if self._store is None:
            self._store = key, PatchStore(patches, device, self._dtype, keep=keep)
        return self._store[1]

    def release_device(self) -> None:
        """Give up device memory; the next block takes it again."""
        if self._store is not None:
            self._store[1].release_device()

    def release_host(self) -> int:
        """Give up what is in RAM too; returns its bytes."""
        if self._store is None:
            return 0
        size = self._store[1].host_bytes
        self._store[1].close()
        self._store = None
        return size
