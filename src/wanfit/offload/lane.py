"""Copies to the device beside the computation, ordered by events; on the CPU plain copies, one after the other."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Protocol

import torch

from .trace import Key


class Marker(Protocol):
    """A point in the device's work."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


@dataclass(eq=False)
class Slot:
    """A flat buffer on the device and the block in it."""

    buffer: torch.Tensor
    name: str
    key: Key | None = None
    ready: torch.cuda.Event | None = None
    free: torch.cuda.Event | None = None


@dataclass(frozen=True)
class Speed:
    """Medians of what was measured: bytes a second from host to device, seconds of one block's computation."""

    bandwidth: float
    block_seconds: float


class Lane(Protocol):
    """One way to the device. Called by the computing thread only."""

    pin_for: torch.device | None

    def new_slot(self, nbytes: int, name: str) -> Slot: ...

    def upload(self, slot: Slot, source: torch.Tensor) -> Marker | None:
        """Begin to copy `source` to the start of the slot, after its last use; a marker for the end of the copy."""
        ...

    def acquire(self, slot: Slot) -> None:
        """Make the computation wait for the slot's copy."""
        ...

    def release(self, slot: Slot) -> None:
        """What was issued so far is the slot's last use."""
        ...

    def retire(self, slot: Slot) -> None:
        """The slot is about to be dropped: order its last copy before the next use of its memory."""
        ...

    def drain(self) -> None:
        """Wait for all copies."""
        ...

    def speed(self) -> Speed | None:
        """What was measured in the last few passes; None before the first block is through."""
        ...


def _speed(copies: Iterable[tuple[int, float]], blocks: Iterable[float]) -> Speed | None:
    rates = [nbytes / seconds for nbytes, seconds in copies if seconds > 0]
    times = list(blocks)
    return Speed(median(rates), median(times)) if rates and times else None


_REMEMBERED = 200


class CudaLane:
    """A stream of its own for copies. The computation is whatever stream is current when a block is entered."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pin_for: torch.device | None = device
        self._stream = torch.cuda.Stream(device)
        self._copies: deque[tuple[int, torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_REMEMBERED)
        self._blocks: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque(maxlen=_REMEMBERED)
        self._entered: torch.cuda.Event | None = None

    def _compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def new_slot(self, nbytes: int, name: str) -> Slot:
        slot = Slot(torch.empty(nbytes, dtype=torch.uint8, device=self.device), name)
        slot.free = torch.cuda.Event()
        slot.free.record(self._compute())
        return slot

    def upload(self, slot: Slot, source: torch.Tensor) -> Marker:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            if slot.free is not None:
                self._stream.wait_event(slot.free)
            begin.record(self._stream)
            slot.buffer[: source.numel()].copy_(source, non_blocking=True)
            end.record(self._stream)
        slot.ready = end
        self._copies.append((source.numel(), begin, end))
        return end

    def acquire(self, slot: Slot) -> None:
        compute = self._compute()
        if slot.ready is not None:
            compute.wait_event(slot.ready)
        self._entered = torch.cuda.Event(enable_timing=True)
        self._entered.record(compute)

    def release(self, slot: Slot) -> None:
        left = torch.cuda.Event(enable_timing=True)
        left.record(self._compute())
        slot.free = left
        if self._entered is not None:
            self._blocks.append((self._entered, left))
            self._entered = None

    def retire(self, slot: Slot) -> None:
        if slot.ready is not None:
            self._compute().wait_event(slot.ready)

    def drain(self) -> None:
        self._stream.synchronize()

    def speed(self) -> Speed | None:
        copies = [(n, a.elapsed_time(b) / 1e3) for n, a, b in self._copies if a.query() and b.query()]
        return _speed(copies, [a.elapsed_time(b) / 1e3 for a, b in self._blocks if a.query() and b.query()])


class HostLane:
    """The same on the CPU, where a slot is ordinary memory and a copy is over when `upload` returns."""

    def __init__(self) -> None:
        self.pin_for: torch.device | None = None
        self._copies: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED)
        self._blocks: deque[float] = deque(maxlen=_REMEMBERED)
        self._entered = 0.0

    def new_slot(self, nbytes: int, name: str) -> Slot:
        return Slot(torch.empty(nbytes, dtype=torch.uint8), name)

    def upload(self, slot: Slot, source: torch.Tensor) -> None:
        begin = time.perf_counter()
        slot.buffer[: source.numel()].copy_(source)
        self._copies.append((source.numel(), time.perf_counter() - begin))

    def acquire(self, slot: Slot) -> None:
        self._entered = time.perf_counter()

    def release(self, slot: Slot) -> None:
        self._blocks.append(time.perf_counter() - self._entered)

    def retire(self, slot: Slot) -> None:
        """Nothing is under way."""

    def drain(self) -> None:
        """Nothing is under way."""

    def speed(self) -> Speed | None:
        return _speed(self._copies, self._blocks)


def lane_for(device: torch.device) -> Lane:
    """The lane of a device: copies run beside the computation on CUDA only."""
    return CudaLane(device) if device.type == "cuda" else HostLane()
