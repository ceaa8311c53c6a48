"""What decode and encode share: steps, the report, tiles again in a tighter grid after running out of memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..errors import BudgetError
from ..memory.purge import drop_cached_blocks
from .layers import Stage, VaeModel, modules_of
from .ops import WeightReader
from .plan import tighter
from .runner import Settings
from .spool import Spool
from .tile_plan import TilePlan
from .windows import Interval

_FEWEST_QUERIES = 256


@dataclass(frozen=True)
class Step:
    """What runs next: for progress, cancel and tests.

    Args:
        item: of the batch.
        tile: (row, column) in the present grid; None in the part that runs on the whole frame.
        frame: the first input frame of this step, of `frames`.
    """

    item: int
    tile: tuple[int, int] | None
    frame: int
    frames: int


BeforeStep = Callable[[Step], None]
"""Called before each step; what it raises ends the run. `torch.OutOfMemoryError` is treated as a real one."""


@dataclass(frozen=True)
class Setup:
    """What a decode or encode works with: the arguments of `decode`, and the description of the VAE."""

    vae: Any
    model: VaeModel
    plan: TilePlan
    device: torch.device
    host_bytes: int
    spool_directory: Path | None
    before_step: BeforeStep | None
    read: WeightReader

    @property
    def settings(self) -> Settings:
        return Settings(self.plan.chunk, self.plan.channels_last, self.plan.fold_time, self.read)

    def spool(self) -> Spool:
        """For the features between the two parts."""
        return Spool(self.host_bytes, self.spool_directory, pinned=self.device.type == "cuda")

    def announce(self, item: int, tile: tuple[int, int] | None, frame: int, frames: int) -> None:
        if self.before_step is not None:
            self.before_step(Step(item, tile, frame, frames))


@dataclass
class TileReport:
    """What a decode or encode did: the grids it used (more than one after running out of memory), the tiles that
    it finished, and the bytes that waited in a temporary file."""

    grids: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    tiles: int = 0
    spooled_bytes: int = 0


def device_of(stages: Sequence[Stage]) -> torch.device:
    """Where the weights are."""
    return next(modules_of(tuple(stages))[0].parameters()).device


def first_alone(frames: int, step: int) -> list[tuple[int, int]]:
    """(start, end) of the calls: the first frame, then `step` at a time."""
    return [(0, 1), *((start, min(start + step, frames)) for start in range(1, frames, step))]


def run_tiles(
    vae: Any,
    plan: TilePlan,
    run: Callable[[TilePlan, int, int], None],
    release: Callable[[], None],
    report: TileReport,
) -> TilePlan:
    """Runs `run(plan, row, column)` for every tile; out of memory, what is unfinished is cut in half and run again.

    Args:
        release: frees the buffers that belong to a grid.

    Returns: the plan that the last tile ran with.
    Raises: BudgetError budget_exceeded: no tighter grid is left.
    """
    report.grids.append(plan.grid)
    pending = _tiles(plan)
    while pending:
        row, column = pending[0]
        finer: TilePlan | None = None
        try:
            run(plan, row, column)
        except torch.OutOfMemoryError as error:
            finer = tighter(vae, plan)
            if finer is None:
                raise _exhausted(plan) from error
        if finer is None:
            report.tiles += 1
            pending.pop(0)
            continue
        release()
        free_cached_memory(plan)
        open_cores = [(plan.rows[r].core, plan.columns[c].core) for r, c in pending]
        plan = finer
        report.grids.append(plan.grid)
        pending = [
            (r, c)
            for r, c in _tiles(plan)
            if any(
                _inside(plan.rows[r].core, rows) and _inside(plan.columns[c].core, columns)
                for rows, columns in open_cores
            )
        ]
    return plan


def run_whole(plan: TilePlan, run: Callable[[int], None], queries: int) -> None:
    """Runs `run(query_rows)` for the whole-frame part; out of memory, again with attention in smaller pieces.

    Args:
        queries: positions of the frame where attention is.
    """
    rows = 0
    while True:
        again = False
        try:
            run(rows)
        except torch.OutOfMemoryError as error:
            rows = (rows or queries) // 2
            if rows < _FEWEST_QUERIES:
                raise _exhausted(plan) from error
            again = True
        if not again:
            return
        free_cached_memory(plan)


def free_cached_memory(plan: TilePlan) -> None:
    if plan.device == "cuda":
        drop_cached_blocks()


def _tiles(plan: TilePlan) -> list[tuple[int, int]]:
    return [(row, column) for row in range(len(plan.rows)) for column in range(len(plan.columns))]


def _inside(part: Interval, whole: Interval) -> bool:
    return whole[0] <= part[0] and part[1] <= whole[1]


def _exhausted(plan: TilePlan) -> BudgetError:
    return BudgetError(
        "budget_exceeded",
        plan.direction,
        f"The device ran out of memory with {plan.grid[0]}x{plan.grid[1]} tiles, which were planned to need "
        f"{plan.predicted_bytes / 1024**3:.2f} GiB, and no tighter grid is left",
        "Free device memory, or use a smaller <width> and <height>",
    )
