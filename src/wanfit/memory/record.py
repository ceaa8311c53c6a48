"""The memory record of a run: what each stage held at its highest, and a trace over time.

A sampler thread reads the process's resident set every few milliseconds; on CUDA the allocator's own peak
counters are reset at each stage, so no peak between two samples is missed there. What a machine has no counter for
is left out and named in `unread`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import TracebackType

import psutil
import torch

from .counters import Counters, Reading

# Beyond this the trace is thinned and sampled half as often; the peaks of the stages are kept apart from it.
MAX_SAMPLES = 20_000


SLOW_EVERY = 10
"""Of so many samples one reads the counters that cost more: the driver, the allocator's statistics, swap."""


@dataclass(frozen=True)
class PlannedPeak:
    """What the plan says of a stage, in bytes. Device: at the least, and with the blocks that stay; RAM: of its own,
    beyond what the process had before the run."""

    vram_needed: int
    vram_peak: int
    ram_needed: int


@dataclass
class Stage:
    """One stage of a run. Bytes; None where this machine has no such counter.

    `rss` is all resident memory of the process; `rss_files` the part of it that is mapped files (weights
    read in place), which the system takes back when it needs the room. `device_used_peak` is the whole card's, by all
    processes; `inactive_peak` is held by the allocator in pieces that it cannot give back (fragmentation);
    `pinned_peak` page-locked host memory; `swap_peak` the system's; `spilled_peak` device memory that Windows keeps in
    RAM, at the least; `disk_read` was read from disk, not from the page cache.
    """

    name: str
    start_s: float
    seconds: float = 0.0
    rss_before: int = 0
    rss_peak: int = 0
    rss_after: int = 0
    rss_files_peak: int | None = None
    allocated_peak: int | None = None
    reserved_peak: int | None = None
    device_used_peak: int | None = None
    inactive_peak: int | None = None
    pinned_peak: int | None = None
    swap_peak: int | None = None
    spilled_peak: int | None = None
    disk_read: int | None = None
    planned: PlannedPeak | None = None


@dataclass
class Sample:
    """One point of the trace. Bytes; `vram` is what PyTorch's allocator has reserved on the device."""

    at_s: float
    rss: int
    rss_files: int | None
    vram: int | None


@dataclass
class MemoryRecord:
    """Collects stages and a trace. Use as a context manager; inside it, call `begin(name)` at each stage.

    Args:
        device: where the model computes; CUDA counters are read only for a CUDA device.
        interval_s: time between two samples of the thread.
        planned: what a plan says, by stage name.

    Attributes:
        unread: counters that this machine does not have, with the reason.
    """

    device: torch.device
    interval_s: float = 0.02
    planned: Mapping[str, PlannedPeak] = field(default_factory=dict[str, PlannedPeak])
    stages: list[Stage] = field(default_factory=list[Stage])
    trace: list[Sample] = field(default_factory=list[Sample])

    def __post_init__(self) -> None:
        self._process = psutil.Process()
        self._cuda = self.device.type == "cuda"
        self._started = time.perf_counter()
        self._counters = Counters(self.device)
        self.unread: dict[str, str] = self._counters.unread
        self._taken = 0
        self._current: Stage | None = None
        self._read_before: int | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="wanfit-memory", daemon=True)

    def __enter__(self) -> MemoryRecord:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self._stop.set()
        self._thread.join()

    @property
    def running(self) -> Stage | None:
        """The stage that is running now."""
        return self._current

    def begin(self, name: str) -> None:
        """End the current stage, if any, and begin stage `name`. Leaving the record ends the last one."""
        self.end()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self.device)
        with self._lock:
            self._current = Stage(name, time.perf_counter() - self._started, planned=self.planned.get(name))
        self._current.rss_before = self._sample(slow=True).rss
        self._read_before = self._counters.disk_read()

    def expect(self, planned: PlannedPeak) -> None:
        """What is planned for something that begins within the running stage; the largest counts."""
        stage = self._current
        if stage is not None:
            both = [planned] if stage.planned is None else [stage.planned, planned]
            stage.planned = PlannedPeak(
                max(each.vram_needed for each in both),
                max(each.vram_peak for each in both),
                max(each.ram_needed for each in both),
            )

    def end(self) -> None:
        """End the current stage; nothing happens when there is none."""
        stage = self._current
        if stage is None:
            return
        if self._cuda:
            torch.cuda.synchronize(self.device)
            stage.allocated_peak = torch.cuda.max_memory_allocated(self.device)
            stage.reserved_peak = torch.cuda.max_memory_reserved(self.device)
        stage.rss_after = self._sample(slow=True).rss
        read = self._counters.disk_read()
        if read is not None and self._read_before is not None:
            stage.disk_read = read - self._read_before
        with self._lock:
            self._current = None
        stage.seconds = time.perf_counter() - self._started - stage.start_s
        self.stages.append(stage)

    def _sample(self, *, slow: bool = False) -> Sample:
        reading = self._counters.read() if slow else None
        info = self._process.memory_info()
        files = getattr(info, "shared", None)
        vram = torch.cuda.memory_reserved(self.device) if self._cuda else None
        sample = Sample(time.perf_counter() - self._started, info.rss, files, vram)
        with self._lock:
            self.trace.append(sample)
            if self._current is not None:
                self._current.rss_peak = max(self._current.rss_peak, sample.rss)
                if files is not None:
                    self._current.rss_files_peak = max(self._current.rss_files_peak or 0, files)
                if reading is not None:
                    _raise_peaks(self._current, reading)
        return sample

    def _sample_until_stopped(self) -> None:
        while not self._stop.wait(self.interval_s):
            self._taken += 1
            self._sample(slow=self._taken % SLOW_EVERY == 0)
            if len(self.trace) > MAX_SAMPLES:
                with self._lock:
                    del self.trace[1::2]
                self.interval_s *= 2

    def samples(self) -> list[Sample]:
        """The trace as it is now; sampling may go on meanwhile."""
        with self._lock:
            return list(self.trace)

    def to_json(self) -> dict[str, object]:
        """Stages and highest values, in bytes and seconds; the trace is left to the chart."""
        return {
            "device": str(self.device),
            "sample_interval_s": self.interval_s,
            "rss_peak": max((stage.rss_peak for stage in self.stages), default=0),
            "allocated_peak": max((stage.allocated_peak or 0 for stage in self.stages), default=0)
            if self._cuda
            else None,
            "unread": dict(self.unread),
            "stages": [asdict(stage) for stage in self.stages],
        }

    def _planned(self, stage: Stage) -> str:
        """Device bytes on CUDA, RAM of its own on the CPU."""
        if stage.planned is None:
            return "-"
        if not self._cuda:
            return f"+{gib(stage.planned.ram_needed)} RAM"
        low, high = stage.planned.vram_needed, stage.planned.vram_peak
        return gib(low) if low == high else f"{low / 2**30:.2f} to {gib(high)}"

    def table(self) -> str:
        """A plain-text table of the stages, GiB."""
        rows = [("stage", "seconds", "RAM peak", "RAM after", "VRAM peak", "VRAM reserved", "planned")]
        for stage in self.stages:
            rows.append(
                (
                    stage.name,
                    f"{stage.seconds:.2f}",
                    gib(stage.rss_peak),
                    gib(stage.rss_after),
                    gib(stage.allocated_peak),
                    gib(stage.reserved_peak),
                    self._planned(stage),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(
                cell.ljust(width) if column == 0 else cell.rjust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in rows
        )

    def notes(self) -> list[str]:
        """What the table does not show: memory in the wrong place, and what could not be read."""
        lines: list[str] = []
        for stage in self.stages:
            if stage.spilled_peak:
                lines.append(
                    f"{stage.name}: at least {gib(stage.spilled_peak)} of device memory lay in RAM (Windows' shared "
                    "GPU memory), many times slower: take less, or switch the fallback off in the driver's settings"
                )
        if self.unread:
            lines.append("not read: " + "; ".join(f"{name} ({why})" for name, why in self.unread.items()))
        return lines


def _raise_peaks(stage: Stage, reading: Reading) -> None:
    for name, value in asdict(reading).items():
        if value is not None:
            setattr(stage, f"{name}_peak", max(getattr(stage, f"{name}_peak") or 0, value))


def gib(value: int | None) -> str:
    """Bytes as GiB with a unit; `-` where there is no such counter."""
    return "-" if value is None else f"{value / 2**30:.2f} GiB"
