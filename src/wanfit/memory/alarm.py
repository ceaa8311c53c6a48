"""The alarm: whether device or host are about to run out while a run goes on. Read between blocks, without a sync."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from ..errors import RunError
from .host import HostRoom
from .purge import drop_cached_blocks

MIB = 2**20

VRAM_MARGIN = 256 * MIB
"""Half of what a plan leaves alone (`device.RESERVE_BYTES`): a run that keeps to its plan rings no alarm."""

RAM_MARGIN, RAM_SHARE = 1024 * MIB, 0.05
"""The smaller of the two: bytes, and a share of the RAM there is."""

STOP = 0.25
"""Of a margin. Below it a run that has nothing left to give up ends by itself, before the system ends it."""


@dataclass(frozen=True)
class Margins:
    """Bytes that should stay free on the device (by all processes) and on the host."""

    vram: int
    ram: int


@dataclass(frozen=True)
class Shortage:
    """One kind of memory within its margin. Bytes."""

    kind: Literal["VRAM", "RAM"]
    free: int
    margin: int

    @property
    def urgent(self) -> bool:
        """Whether to stop rather than to go on as it is."""
        return self.free < STOP * self.margin

    def __str__(self) -> str:
        return f"{self.free / 2**30:.2f} GiB of {self.kind} are free, less than the margin of {self.margin / 2**30:.2f}"


class Alarm:
    """Reads what is left, at most every `interval_s`.

    Args:
        device: whose memory counts beside the host's; the CPU has none of its own.
        margins: None for the usual ones; a container's limit counts as its RAM.
        clock: seconds.
    """

    def __init__(
        self,
        device: torch.device,
        margins: Margins | None = None,
        *,
        interval_s: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device = device
        self._host = HostRoom()
        self.margins = margins or Margins(VRAM_MARGIN, min(RAM_MARGIN, int(RAM_SHARE * self._host.installed)))
        self._interval_s, self._clock = interval_s, clock
        self._next = float("-inf")

    def check(self) -> tuple[Shortage, ...]:
        """What is short now; nothing when it was looked at a moment ago."""
        now = self._clock()
        if now < self._next:
            return ()
        self._next = now + self._interval_s
        found: list[Shortage] = []
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if free < self.margins.vram:
                found.append(Shortage("VRAM", free, self.margins.vram))
        ram = self._host.available()
        if ram < self.margins.ram:
            found.append(Shortage("RAM", ram, self.margins.ram))
        return tuple(found)

    def between_tiles(self) -> None:
        """For a pass of the VAE, which begins within what is free: at the very last smaller tiles, or a stop.

        Raises:
            torch.OutOfMemoryError: to be taken for a real one, which halves the tiles that are not finished.
            RunError: memory_low: RAM is almost full, which smaller tiles do not help.
        """
        for shortage in self.check():
            if not shortage.urgent:
                continue
            if shortage.kind == "RAM":
                raise RunError(
                    "memory_low",
                    "decode",
                    f"{shortage}, and frames need more: the run stopped before it was ended",
                    "Close other programs, or take a smaller <width>, <height> or <num_frames>",
                )
            drop_cached_blocks()
            free, _ = torch.cuda.mem_get_info(self.device)
            if free < STOP * shortage.margin:
                raise torch.OutOfMemoryError(str(shortage))
