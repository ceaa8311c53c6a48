"""Purge by scope, and the truth about it: each counter before and after, what stayed and who holds it."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

import psutil
import torch

from ..errors import InputError
from .counters import Counters
from .purge import empty_device_cache, empty_host_cache, trim_heap
from .record import gib
from .report import table

SCOPES: Mapping[str, str] = {
    "device blocks": "blocks of transformers that are kept on the device",
    "host blocks": "blocks that are kept in RAM, and those on the device with them",
    "device cache": "device memory that PyTorch holds unused",
    "host cache": "page-locked memory that PyTorch keeps for later, and freed pages of the heap",
}

_SMALL = 64 * 2**20
"""Bytes that are not worth a line about what stayed."""


class Holder(Protocol):
    """Something that holds memory and can give it back, as `offload.BlockStore`."""

    def release_device(self) -> None: ...

    def release(self) -> None: ...

    @property
    def report(self) -> Held: ...


class Held(Protocol):
    """What a holder has, in bytes, as `offload.OffloadReport`."""

    @property
    def device_bytes(self) -> int: ...

    @property
    def host_bytes(self) -> int: ...


@dataclass(frozen=True)
class Snapshot:
    """Bytes; None where there is no such counter.

    Args:
        rss: resident memory of this process. pinned: page-locked by this process.
        allocated, reserved: by tensors, and by PyTorch's allocator, on the device.
        device_used: by all processes.
    """

    rss: int
    pinned: int | None
    allocated: int | None
    reserved: int | None
    device_used: int | None


@dataclass(frozen=True)
class PurgeReport:
    """What a purge changed.

    Args:
        done: one line for each scope.
        stayed: what is still held, and by whom.
    """

    scopes: tuple[str, ...]
    before: Snapshot
    after: Snapshot
    done: tuple[str, ...]
    stayed: tuple[str, ...]

    def lines(self) -> list[str]:
        """For people."""
        rows = [("counter", "before", "after", "freed")]
        after = asdict(self.after)
        for name, value in asdict(self.before).items():
            if value is not None and after[name] is not None:
                freed = value - after[name]
                rows.append((name, gib(value), gib(after[name]), f"{freed / 2**30:+.2f} GiB"))
        return [*self.done, *table(rows), *self.stayed]


def take_snapshot(device: torch.device) -> Snapshot:
    """The counters at this moment."""
    rss = int(psutil.Process().memory_info().rss)
    if device.type != "cuda":
        return Snapshot(rss, None, None, None, None)
    reading = Counters(device).read()
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    return Snapshot(rss, reading.pinned, allocated, reserved, reading.device_used)


def purge(device: torch.device, scopes: Sequence[str], holders: Mapping[str, Holder] | None = None) -> PurgeReport:
    """Give memory back, by scope, in the order of `SCOPES`.

    Args:
        scopes: keys of `SCOPES`.
        holders: by name; only these give up blocks. What a run still needs must not be among them.

    Raises:
        InputError: number_invalid: an unknown scope.
    """
    unknown = [scope for scope in scopes if scope not in SCOPES]
    if unknown or not scopes:
        raise InputError(
            "number_invalid",
            "purge",
            f"<scope> is {', '.join(map(repr, unknown)) or 'not given'}",
            f"Use {', '.join(SCOPES)}",
        )
    held = dict(holders or {})
    before = take_snapshot(device)
    actions: Mapping[str, Callable[[], str]] = {
        "device blocks": lambda: _release(held, host=False),
        "host blocks": lambda: _release(held, host=True),
        "device cache": lambda: _device_cache(device),
        "host cache": _host_cache,
    }
    done = tuple(f"{scope}: {actions[scope]()}" for scope in SCOPES if scope in scopes)
    after = take_snapshot(device)
    return PurgeReport(tuple(scopes), before, after, done, tuple(_stayed(after, held)))


def _release(holders: Mapping[str, Holder], *, host: bool) -> str:
    freed: list[str] = []
    for name, holder in holders.items():
        had = holder.report.host_bytes if host else holder.report.device_bytes
        (holder.release if host else holder.release_device)()
        now = holder.report.host_bytes if host else holder.report.device_bytes
        freed.append(f"{name} gave up {gib(had - now)}")
    gc.collect()
    return "; ".join(freed) or "no model holds blocks"


def _device_cache(device: torch.device) -> str:
    empty_device_cache(device)
    return "returned to the driver" if device.type == "cuda" else "there is none without a CUDA device"


def _host_cache() -> str:
    pinned = "returned" if empty_host_cache() else "this PyTorch cannot return it"
    return f"page-locked memory: {pinned}; heap: {'trimmed' if trim_heap() else 'this system cannot trim it'}"


def _stayed(after: Snapshot, holders: Mapping[str, Holder]) -> list[str]:
    lines: list[str] = []
    known = 0
    for name, holder in holders.items():
        known += holder.report.device_bytes
        for kind, nbytes in (("device", holder.report.device_bytes), ("host", holder.report.host_bytes)):
            if nbytes >= _SMALL:
                lines.append(f"stayed: {gib(nbytes)} of {kind} memory: blocks of {name}")
    beyond = (
        (after.allocated, known, "tensors that the program still refers to"),
        (after.reserved, after.allocated, "unused, in pieces beside tensors that live"),
        (after.device_used, after.reserved, "CUDA itself and other programs"),
    )
    for whole, part, what in beyond:
        if whole is not None and part is not None and whole - part >= _SMALL:
            lines.append(f"stayed: {gib(whole - part)} of device memory: {what}")
    return lines
