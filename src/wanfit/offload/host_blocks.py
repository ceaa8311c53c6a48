"""Blocks on the host: kept in the cache, or passing through a small ring that one thread fills ahead of use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import ParamSpec

import torch

from .host_cache import HostCache, Place
from .host_memory import HostBuffer
from .lane import Marker
from .layout import Blocks
from .trace import Key, Trace

_P = ParamSpec("_P")


@dataclass(eq=False)
class _Stage:
    """One buffer of the ring; `last_copy` is the end of the copy that its previous block left by."""

    name: str
    buffer: HostBuffer | None = None
    key: Key | None = None
    last_copy: Marker | None = None

    @property
    def pinned(self) -> bool:
        return self.buffer is not None and self.buffer.pinned


class HostBlocks:
    """Reads blocks of several files into host memory, ahead of use.

    Everything but the reading itself is done by the thread that computes. A request takes its buffer before it is
    handed to the reading thread, so that this thread never waits for anything but a copy that is under way.

    Args:
        files: one for each expert. places: blocks to keep. stages: buffers of the ring.
        pin_for: the device that the buffers are pinned for.
    """

    def __init__(
        self,
        files: Sequence[Blocks],
        places: int,
        stages: int,
        pin_for: torch.device | None,
        trace: Trace,
    ) -> None:
        self._files, self._pin_for, self._trace = files, pin_for, trace
        self._place_bytes = max(file.largest for file in files)
        self.cache = HostCache(self._place_bytes, places)
        self._stages = [_Stage(f"stage {i}") for i in range(stages)]
        self._pending: dict[Key, Future[None]] = {}
        self._reader: ThreadPoolExecutor | None = None

    @property
    def stage_bytes(self) -> int:
        """Bytes of the ring that are taken."""
        return sum(self._place_bytes for stage in self._stages if stage.buffer is not None)

    @property
    def pinned_bytes(self) -> int:
        ring = sum(self._place_bytes for stage in self._stages if stage.pinned)
        return self.cache.pinned_bytes + ring

    def prefer(self, keys: Iterable[Key]) -> None:
        """Keep these blocks, as many as there are places for, from now on."""
        self._settle()
        self.cache.prefer(keys)

    def ready(self, key: Key) -> bool:
        """Whether `take` would not wait."""
        pending = self._pending.get(key)
        if pending is not None:
            return pending.done()
        place = self.cache.get(key)
        return self._stage_of(key) is not None or (place is not None and place.filled and self._direct(place))

    def copies_freely(self, key: Key) -> bool:
        """Whether the copy of a ready block to the device does not hold up the thread that begins it."""
        holder = self._stage_of(key) or self.cache.get(key)
        if self._pin_for is None or holder is None:
            return True
        return holder.pinned

    def request(self, key: Key) -> bool:
        """Begin to read a block; False when there is no buffer for it now. True when it is there or on its way."""
        if key in self._pending or self.ready(key):
            return True
        place = self.cache.get(key)
        if place is not None and not (place.filled and not self._direct(place)):
            self._pending[key] = self._submit(self._fill_place, key, place)
            return True
        stage = next((s for s in self._stages if s.key is None), None)
        if stage is None:
            return False
        stage.key = key
        self._pending[key] = self._submit(self._fill_stage, key, stage, place)
        return True

    def fill_free(self, keys: Iterable[Key]) -> None:
        """Read one more of these blocks into a free place, if the reading thread has nothing else to do."""
        for key, pending in list(self._pending.items()):
            if not pending.done():
                return
            if pending.exception() is None or isinstance(pending.exception(), MemoryError):
                self._finish_unasked(key)
        for key in keys:
            if self.cache.get(key) is None:
                place = self.cache.reserve(key)
                if place is not None:
                    self._pending[key] = self._submit(self._fill_place, key, place)
                return

    def take(self, key: Key) -> torch.Tensor:
        """A block's bytes, waiting for them if need be. Call `passed_on` when the copy from them was begun."""
        while True:
            if not self.request(key):
                self._evict_stage()
                continue
            if self._finish(key):
                break
        size = self._files[key[0]].layouts[key[1]].nbytes
        stage = self._stage_of(key)
        if stage is not None and stage.buffer is not None:
            return stage.buffer.data[:size]
        place = self.cache.get(key)
        if place is None:
            raise LookupError(f"block {key} has no host buffer")
        return place.memory(self._pin_for)[:size]

    def passed_on(self, key: Key, marker: Marker | None) -> None:
        """The copy of a block was begun; `marker` is its end. A buffer of the ring is free from there on."""
        stage, place = self._stage_of(key), self.cache.get(key)
        if stage is not None:
            stage.key, stage.last_copy = None, marker
        elif place is not None:
            place.last_copy = marker

    def shrink(self) -> int:
        """Keep half as many blocks from now on; returns the bytes given back."""
        self._settle()
        return self.cache.halve()

    def release(self) -> None:
        """Give all host memory back. No copy to the device may be under way."""
        self._settle()
        self.cache.close()
        for stage in self._stages:
            stage.key, stage.last_copy = None, None
            if stage.buffer is not None:
                stage.buffer.close()
                stage.buffer = None

    def close(self) -> None:
        """End the reading thread and give the memory back."""
        if self._reader is not None:
            self._reader.shutdown(wait=True, cancel_futures=True)
            self._reader = None
        self._pending.clear()
        self.release()

    def _direct(self, place: Place) -> bool:
        """Whether the device copies from this place itself, and not through the pinned ring."""
        return self._pin_for is None or place.pinned or self._ring_is_pageable()

    def _ring_is_pageable(self) -> bool:
        return any(stage.buffer is not None and not stage.pinned for stage in self._stages)

    def _stage_of(self, key: Key) -> _Stage | None:
        return next((stage for stage in self._stages if stage.key == key), None)

    def _submit(self, work: Callable[_P, None], *arguments: _P.args, **options: _P.kwargs) -> Future[None]:
        if self._reader is None:
            self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="wanfit-read")
        return self._reader.submit(work, *arguments, **options)

    def _finish(self, key: Key) -> bool:
        """Wait for a request; False when its buffer was not to be had and the block must be asked for again."""
        pending = self._pending.get(key)
        if pending is None:
            return True
        error = pending.exception()
        del self._pending[key]
        stage, place = self._stage_of(key), self.cache.get(key)
        if error is not None:
            if stage is not None:
                stage.key = None
            if stage is not None or place is None or not isinstance(error, MemoryError):
                raise error
            self._trace.notice(f"Host memory ran out ({error}); fewer blocks are kept there, the rest is read again")
            self.cache.give_up(place)
            return False
        if stage is None and place is not None:
            place.filled = True
            if self._pin_for is not None and not place.pinned:
                self._trace.notice("Host memory could not be pinned: blocks are copied once more, or unpinned")
            return self._direct(place)
        return True

    def _finish_unasked(self, key: Key) -> None:
        """Note the end of a read into the cache; blocks in the ring wait for their `take`."""
        if self._stage_of(key) is None:
            self._finish(key)

    def _evict_stage(self) -> None:
        """Free a buffer of the ring whose block was read too early."""
        victim = self._stages[0]
        if victim.key is not None:
            self._finish(victim.key)
            victim.key = None

    def _settle(self) -> None:
        """Wait for the reading thread and forget what it read into the ring."""
        for key in list(self._pending):
            self._finish(key)
        for stage in self._stages:
            stage.key = None

    def _fill_place(self, key: Key, place: Place) -> None:
        if place.last_copy is not None:
            place.last_copy.synchronize()
        memory = place.memory(self._pin_for)
        self._trace.add("read", key, "cache")
        file = self._files[key[0]]
        file.read(key[1], memory)
        file.forget(key[1])  # or it would be in memory twice

    def _fill_stage(self, key: Key, stage: _Stage, kept: Place | None) -> None:
        if stage.last_copy is not None:
            stage.last_copy.synchronize()
        if stage.buffer is None:
            stage.buffer = HostBuffer(self._place_bytes, self._pin_for)
        if kept is not None:
            self._trace.add("stage", key, stage.name)
            stage.buffer.data.copy_(kept.memory(self._pin_for))
        else:
            self._trace.add("read", key, stage.name)
            self._files[key[0]].read(key[1], stage.buffer.data)
