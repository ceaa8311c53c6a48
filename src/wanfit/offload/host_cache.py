"""Blocks kept in host memory, in equal places of a few large buffers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from .host_memory import HostBuffer
from .lane import Marker
from .trace import Key

SLAB_BYTES = 2**30
"""Size of one buffer, about: large enough that there are few, small enough to be taken and pinned step by step."""


class _Slab:
    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.buffer: HostBuffer | None = None


@dataclass(eq=False)
class Place:
    """Room for one block; the memory behind it is taken when it is first used."""

    slab: _Slab
    offset: int
    nbytes: int
    key: Key | None = None
    filled: bool = False
    last_copy: Marker | None = None
    """The end of the last copy from here: what is written next must wait for it."""

    def memory(self, pin_for: torch.device | None) -> torch.Tensor:
        """Raises MemoryError: the system has no room."""
        if self.slab.buffer is None:
            self.slab.buffer = HostBuffer(self.slab.nbytes, pin_for)
        return self.slab.buffer.data[self.offset : self.offset + self.nbytes]

    @property
    def pinned(self) -> bool:
        return self.slab.buffer is not None and self.slab.buffer.pinned


class HostCache:
    """Which block has which place. All experts share the places.

    Args:
        place_bytes: the largest block. count: places.
    """

    def __init__(self, place_bytes: int, count: int) -> None:
        per_slab = max(1, SLAB_BYTES // place_bytes)
        self._slabs: list[_Slab] = []
        self._places: list[Place] = []
        self._kept: dict[Key, Place] = {}
        while len(self._places) < count:
            number = min(per_slab, count - len(self._places))
            slab = _Slab(number * place_bytes)
            self._slabs.append(slab)
            self._places += [Place(slab, i * place_bytes, place_bytes) for i in range(number)]

    @property
    def count(self) -> int:
        return len(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes taken so far."""
        return sum(slab.nbytes for slab in self._slabs if slab.buffer is not None)

    @property
    def pinned_bytes(self) -> int:
        return sum(slab.nbytes for slab in self._slabs if slab.buffer is not None and slab.buffer.pinned)

    def get(self, key: Key) -> Place | None:
        return self._kept.get(key)

    def prefer(self, keys: Iterable[Key]) -> None:
        """Give places to these blocks, in this order, as far as they go: free ones, then those of other experts.

        Blocks of other experts stay where their place is not needed.
        """
        wanted = list(keys)[: self.count]
        keep = set(wanted)
        experts = {expert for expert, _ in wanted}
        for key in [key for key in self._kept if key not in keep and key[0] in experts]:
            self.drop(key)
        for key in wanted:
            if key in self._kept:
                continue
            if self.reserve(key) is None:
                self.drop(next(p.key for p in self._places if p.key is not None and p.key not in keep))
                self.reserve(key)

    def reserve(self, key: Key) -> Place | None:
        """A free place for a block; None when there is none."""
        place = next((p for p in self._places if p.key is None), None)
        if place is not None:
            place.key = key
            self._kept[key] = place
        return place

    def drop(self, key: Key) -> None:
        place = self._kept.pop(key)
        place.key, place.filled = None, False

    def give_up(self, place: Place) -> None:
        """The memory behind a place is not to be had: go on without the places of its buffer."""
        for lost in [p for p in self._places if p.slab is place.slab]:
            self._places.remove(lost)
            if lost.key is not None:
                self._kept.pop(lost.key)
        self._slabs.remove(place.slab)

    def halve(self) -> int:
        """Give back half of the buffers that were taken, and all that were not; returns the bytes. Nothing is read now.

        Their blocks have no place from then on.
        """
        taken = [slab for slab in self._slabs if slab.buffer is not None]
        lost = set(self._slabs) - set(taken[: len(taken) // 2])
        for place in [p for p in self._places if p.slab in lost]:
            if place.last_copy is not None:
                place.last_copy.synchronize()
            if place.key is not None:
                self.drop(place.key)
            self._places.remove(place)
        self._slabs = [slab for slab in self._slabs if slab not in lost]
        for slab in lost:
            if slab.buffer is not None:
                slab.buffer.close()
                slab.buffer = None
        return sum(slab.nbytes for slab in taken[len(taken) // 2 :])

    def close(self) -> None:
        """Forget all blocks and give the memory back; it is taken again when it is needed."""
        for place in self._places:
            place.key, place.filled = None, False
        self._kept.clear()
        for slab in self._slabs:
            if slab.buffer is not None:
                slab.buffer.close()
                slab.buffer = None
