"""Out of memory inside a forward: free, take the next tighter setting, run the forward again. About to be: at the
next block."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from ..blocks import ForwardSettings
from ..errors import BudgetError, RunError
from ..memory.alarm import Alarm, Shortage
from ..memory.purge import drop_cached_blocks, trim_heap
from .store import BlockStore

T = TypeVar("T")

PACKING_CHUNK = 1024
"""Tokens. From here on q, k and v take so much more than a chunk that packing them comes first."""
SMALLEST_CHUNK = 256
"""Tokens. Below this a chunk is no longer what a forward's memory is made of."""

_SMALLER = "Take a smaller <width>, <height> or <num_frames>, or a smaller file"


class Ladder:
    """Settings of a run, from those it was planned with to the tightest; it only ever goes down.

    First fewer blocks stay on the device, by half each time: the result stays the same to the last bit. Then the
    chunks get smaller, by half each time, and with them the groups of attention heads: the same up to rounding. At
    1024 tokens q, k and v are packed in 8 bits (see `ForwardSettings`), then the chunks get smaller still. Where it is
    RAM that is short, fewer blocks are kept there, by half each time; on the CPU the other rungs follow. While memory
    is low and not yet out, q, k and v stay as they are.

    Args:
        settings: where to begin.
        store: whose resident blocks may go; None when there are none.
        on_step: told what was changed, for the log and the report.
        alarm: asked before each block; None for out-of-memory errors alone.
        make_room: called before the first rung for VRAM: lets others in this program give device memory back.
    """

    def __init__(
        self,
        settings: ForwardSettings,
        store: BlockStore | None = None,
        on_step: Callable[[str], None] | None = None,
        alarm: Alarm | None = None,
        make_room: Callable[[Shortage], None] | None = None,
    ) -> None:
        self.settings = settings
        self.steps: list[str] = []
        self._store, self._on_step, self._alarm = store, on_step, alarm
        self._make_room = make_room
        self._cache_dropped = False
        self._at_the_end: set[str] = set()

    def run(self, forward: Callable[[ForwardSettings], T]) -> T:
        """`forward(settings)`, again with tighter settings each time it runs out of memory.

        `forward` must leave its inputs as they are, so that it can be repeated: a transformer's forward from the
        latents, not a single block's, which works in place.

        Raises:
            BudgetError: budget_exceeded: there is nothing tighter.
        """
        while True:
            try:
                return forward(self.settings)
            except torch.cuda.OutOfMemoryError as error:
                what = str(error).split("\n")[0]
            gc.collect()  # outside of `except`: until here the traceback holds the forward's tensors
            if not self._tighten():
                raise BudgetError(
                    "budget_exceeded",
                    "denoise",
                    f"The forward ran out of memory in chunks of {self.settings.chunk_tokens} tokens with no block "
                    f"kept on the device ({what})",
                    _SMALLER,
                )
            drop_cached_blocks()

    def next_block(self) -> ForwardSettings:
        """Settings for the next block of the forward under way: one rung tighter when memory is about to run out.

        Raises:
            RunError: memory_low: almost nothing is left, and there is nothing tighter.
        """
        if self._alarm is not None:
            for shortage in self._alarm.check():
                self._relieve(shortage, self._alarm.device)
        return self.settings

    def _relieve(self, shortage: Shortage, device: torch.device) -> None:
        if shortage.kind == "VRAM" and not self._cache_dropped:
            if self._make_room is not None:
                self._make_room(shortage)
            drop_cached_blocks()  # what PyTorch keeps unused may be all that is missing: looked at again in a moment
            self._cache_dropped = True
            return
        self._cache_dropped = False
        if shortage.kind == "VRAM":
            relieved = self._tighten(f" ({shortage})", exact=not shortage.urgent)
            drop_cached_blocks()
        else:
            relieved = self._keep_less_in_ram(shortage) or (
                device.type == "cpu" and self._tighten(f" ({shortage})", exact=not shortage.urgent)
            )
            trim_heap()
        if relieved:
            return
        if shortage.urgent:
            raise RunError(
                "memory_low",
                "denoise",
                f"{shortage}, and there is nothing left that the run could give up: it stopped before it was ended",
                ("Close other programs, or t" if shortage.kind == "RAM" else "T") + _SMALLER[1:],
            )
        if shortage.kind not in self._at_the_end:
            self._at_the_end.add(shortage.kind)
            self.note(f"nothing is left to give up ({shortage})")

    def _keep_less_in_ram(self, shortage: Shortage) -> bool:
        given = 0 if self._store is None else self._store.shrink_host()
        if given:
            self.note(f"blocks kept in RAM: {given / 2**30:.2f} GiB less ({shortage})")
        return given > 0

    def _tighten(self, why: str = "", *, exact: bool = False) -> bool:
        """One rung; False when there is none. `exact`: none that changes the result beyond rounding."""
        resident = self._store.resident_count if self._store is not None else 0
        if self._store is not None and resident > 0:
            self._store.shrink(resident // 2)
            self.note(f"blocks kept on the device: {resident} -> {resident // 2}{why}")
            return True
        chunk = self.settings.chunk_tokens
        if chunk <= PACKING_CHUNK and not self.settings.packed_attention:
            if exact:
                return False
            self.settings = dataclasses.replace(self.settings, packed_attention=True)
            self.note(f"q, k and v: packed in 8 bits{why}")
            return True
        if chunk <= SMALLEST_CHUNK:
            return False
        smaller = max(SMALLEST_CHUNK, chunk // 2)
        self.settings = dataclasses.replace(self.settings, chunk_tokens=smaller)
        self.note(f"tokens in a chunk: {chunk} -> {smaller}{why}")
        return True

    def note(self, step: str) -> None:
        """Something was given up, or changed: for the log and the report."""
        self.steps.append(step)
        if self._on_step is not None:
            self._on_step(step)
