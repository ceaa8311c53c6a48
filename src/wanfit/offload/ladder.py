"""Out of memory inside a forward: free, take the next tighter setting, run the forward again."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable
from typing import TypeVar

import torch

from ..blocks import ForwardSettings
from ..errors import BudgetError
from ..memory.purge import drop_cached_blocks
from .store import BlockStore

T = TypeVar("T")

PACKING_CHUNK = 1024
"""Tokens. From here on q, k and v take so much more than a chunk that packing them comes first."""
SMALLEST_CHUNK = 256
"""Tokens. Below this a chunk is no longer what a forward's memory is made of."""


class Ladder:
    """Settings of a run, from those it was planned with to the tightest; it only ever goes down.

    First fewer blocks stay on the device, by half each time: the result stays the same to the last bit. Then the
    chunks get smaller, by half each time, and with them the groups of attention heads: the same up to rounding. At
    1024 tokens q, k and v are packed in 8 bits (see `ForwardSettings`), then the chunks get smaller still.

    Args:
        settings: where to begin.
        store: whose resident blocks may go; None when there are none.
        on_step: told what was changed, for the log and the report.
    """

    def __init__(
        self,
        settings: ForwardSettings,
        store: BlockStore | None = None,
        on_step: Callable[[str], None] | None = None,
    ) -> None:
        self.settings = settings
        self.steps: list[str] = []
        self._store, self._on_step = store, on_step

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
                    "Take a smaller <width> and <height>, fewer <num_frames>, or a smaller file",
                )
            drop_cached_blocks()

    def _tighten(self) -> bool:
        resident = self._store.resident_count if self._store is not None else 0
        if self._store is not None and resident > 0:
            self._store.shrink(resident // 2)
            self._log(f"blocks kept on the device: {resident} -> {resident // 2}")
            return True
        chunk = self.settings.chunk_tokens
        if chunk <= PACKING_CHUNK and not self.settings.packed_attention:
            self.settings = dataclasses.replace(self.settings, packed_attention=True)
            self._log("q, k and v: packed in 8 bits")
            return True
        if chunk <= SMALLEST_CHUNK:
            return False
        smaller = max(SMALLEST_CHUNK, chunk // 2)
        self.settings = dataclasses.replace(self.settings, chunk_tokens=smaller)
        self._log(f"tokens in a chunk: {chunk} -> {smaller}")
        return True

    def _log(self, step: str) -> None:
        self.steps.append(step)
        if self._on_step is not None:
            self._on_step(step)
