"""The fewest tiles that fit a budget, and the fastest of several ways to have them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from .job import AxisShape, TileJob
from .tile_plan import TilePlan

MAX_CUTS = 24
"""Tiles along one axis, at most, in a grid that the planner chooses."""
TIME = {1: 1.08, 2: 1.0, 4: 0.94}
"""Relative time by frames at a time, channels last (one H200, equal grids); only to choose between plans."""
_TILE_TIME = 0.01
"""Relative time that one more tile takes beyond its arithmetic, as found there."""


def time_of(plan: TilePlan) -> float:
    """Relative, by estimate."""
    return plan.overhead * TIME[plan.chunk] * (1 + _TILE_TIME * plan.tiles)


class TileSearch:
    """Over jobs that differ in where their tiles begin and in the frames at a time.

    More cuts along an axis need less memory but for rounding to whole positions, so ranges are halved. What a number
    of cuts means along an axis is worked out once for all jobs that begin at the same place.
    """

    def __init__(self, jobs: Sequence[TileJob]) -> None:
        self.jobs = sorted(jobs, key=lambda job: TIME[job.chunk])
        starts = {job.split: job for job in jobs}

        @cache
        def along(split: int, axis: int, count: int) -> AxisShape:
            job = starts[split]
            return AxisShape.of(job.tiles_along(axis, job.cuts(axis, count)))

        self._along = along

    def fastest(self, budget: int) -> TilePlan | None:
        """Of the grids of fewest tiles within `budget` bytes, one for each job; None when no grid fits."""
        best: TilePlan | None = None
        for job in self.jobs:
            # tiling only adds arithmetic: no grid of this job with more tiles can be faster than the best so far
            most = MAX_CUTS**2 if best is None else int((time_of(best) / TIME[job.chunk] - 1) / _TILE_TIME)
            grid = self._fewest(job, budget, most) if job.whole_memory.total <= budget else None
            if grid is None:
                continue
            plan = job.plan(job.cuts(0, grid[0]), job.cuts(1, grid[1]))
            if best is None or time_of(plan) < time_of(best):
                best = plan
        return best

    def least(self) -> TilePlan:
        """The plan of least memory: the smallest tiles."""

        def needed(job: TileJob) -> int:
            return max(job.whole_memory.total, self._needed(job, *_finest(job)))

        job = min(self.jobs, key=needed)
        rows, columns = _finest(job)
        return job.plan(job.cuts(0, rows), job.cuts(1, columns))

    def _needed(self, job: TileJob, rows: int, columns: int) -> int:
        return job.tile_memory(self._along(job.split, 0, rows), self._along(job.split, 1, columns)).total

    def _fewest(self, job: TileJob, budget: int, most: int) -> tuple[int, int] | None:
        """Of no more than `most` tiles; of equally many, those nearest to squares."""
        last_row, last_column = _finest(job)
        if self._needed(job, last_row, last_column) > budget:
            return None
        height, width = job.core_sizes
        found: list[tuple[int, float, int, int]] = []
        for rows in range(1, last_row + 1):
            high = min(last_column, most // rows)
            if high < 1:
                break
            if self._needed(job, rows, high) > budget:
                continue
            low = 1
            while low < high:
                middle = (low + high) // 2
                if self._needed(job, rows, middle) <= budget:
                    high = middle
                else:
                    low = middle + 1
            most = rows * high
            found.append((most, abs(height / rows - width / high), rows, high))
        return min(found)[2:] if found else None


def _finest(job: TileJob) -> tuple[int, int]:
    height, width = job.core_sizes
    return min(MAX_CUTS, height), min(MAX_CUTS, width)
