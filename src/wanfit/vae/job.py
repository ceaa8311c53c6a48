"""One decode or encode with a given split between whole frame and tiles: sizes, cuts, memory, the plan itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .footprint import (
    Run,
    cache_elements,
    decode_peak,
    encode_peak,
    library_bytes,
    multiplications,
    scratch_elements,
    turned_elements,
)
from .layers import Stage, VaeModel
from .spool import HOST_BYTES, waiting_bytes
from .stage_sizes import StageSizes, axis_sizes, combined_sizes, paired
from .tile_plan import Memory, TilePlan
from .windows import (
    AxisTile,
    Interval,
    axis_tiles,
    balanced_cuts,
    frames_between,
    halo,
    level_sizes,
    time_step,
    whole_frame,
)


@dataclass(frozen=True)
class AxisShape:
    """What memory depends on of the tiles along one axis: the largest core, and per stage `axis_sizes`."""

    core: int
    sizes: tuple[tuple[int, int, int], ...]

    @staticmethod
    def of(tiles: Sequence[AxisTile]) -> AxisShape:
        return AxisShape(max(tile.core[1] - tile.core[0] for tile in tiles), tuple(axis_sizes(tiles, max)))


@dataclass(frozen=True)
class TileJob:
    """All that a plan depends on except the cuts; fields as in `TilePlan`."""

    model: VaeModel
    direction: str
    shape: tuple[int, int, int, int, int]
    dtype: torch.dtype
    device: str
    chunk: int
    channels_last: bool
    fold_time: bool
    split: int

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.model.decoder if self.direction == "decode" else self.model.encoder

    @property
    def tiled(self) -> tuple[Stage, ...]:
        return self.stages[self.split :] if self.direction == "decode" else self.stages[: self.split]

    @property
    def whole(self) -> tuple[Stage, ...]:
        return self.stages[: self.split] if self.direction == "decode" else self.stages[self.split :]

    @property
    def entry_sizes(self) -> tuple[int, int]:
        """Height and width of the first stage's input."""
        patch = self.model.patch if self.direction == "encode" else 1
        return self.shape[3] // patch, self.shape[4] // patch

    @property
    def core_sizes(self) -> tuple[int, int]:
        """Positions along both axes that cores divide up."""
        rows, columns = self._levels
        end = -1 if self.direction == "decode" else self.split
        return rows[end], columns[end]

    def halo(self, axis: int) -> Interval:
        """Of the tiled stage at full resolution, whose windows should be equal, in positions of the core."""
        return halo(self.tiled, axis, -1 if self.direction == "decode" else 0)

    def cuts(self, axis: int, count: int) -> Sequence[Interval]:
        return balanced_cuts(self.core_sizes[axis], count, self._halos[axis])

    @cached_property
    def _halos(self) -> tuple[Interval, Interval]:
        return self.halo(0), self.halo(1)

    def tiles_along(self, axis: int, cuts: Sequence[Interval]) -> tuple[AxisTile, ...]:
        start = self.split if self.direction == "decode" else 0
        return axis_tiles(self.tiled, self._levels[axis][start], cuts, axis)

    def plan(self, row_cuts: Sequence[Interval], column_cuts: Sequence[Interval]) -> TilePlan:
        rows, columns = self.tiles_along(0, row_cuts), self.tiles_along(1, column_cuts)
        return TilePlan(
            self.direction,
            self.shape,
            self.dtype,
            self.device,
            rows,
            columns,
            self.split,
            self.chunk,
            self.channels_last,
            self.fold_time,
            self._overhead(rows, columns),
            self.memory(rows, columns),
            self.feature_bytes,
        )

    @property
    def feature_bytes(self) -> int:
        """Bytes of what lies between the whole-frame part and the tiles, all frames of one batch item."""
        rows, columns = self._levels
        frames = frames_between(self.stages[: self.split], self.shape[2])
        area = rows[self.split] * columns[self.split]
        return self.stages[self.split].inputs * frames * area * self.dtype.itemsize

    def memory(self, rows: Sequence[AxisTile], columns: Sequence[AxisTile]) -> Memory:
        """Of the larger of the two parts."""
        tile = self.tile_memory(AxisShape.of(rows), AxisShape.of(columns))
        return max(self.whole_memory, tile, key=lambda memory: memory.total)

    def tile_memory(self, rows: AxisShape, columns: AxisShape) -> Memory:
        stages, sizes = self.tiled, paired(rows.sizes, columns.sizes)
        heights, widths = self._levels
        item = self.dtype.itemsize
        height, width = rows.core, columns.core
        if self.direction == "decode":
            features = stages[0].inputs * self.chunk * heights[self.split] * widths[self.split] * item
            # the emitted frames: clamped in the dtype, then in float32, then in the sink's dtype
            leaving = self.model.channels * self.model.patch**2 * self.chunk * height * width * (2 * item + 8)
            peak = self._worst(lambda run, count: decode_peak(stages, sizes, run, 0, count, leaving), self.chunk)
            return self._memory(stages, sizes, features + peak)
        frames = time_step(stages)
        entry = stages[0].inputs * frames * sizes[0].window[0] * sizes[0].window[1] * item
        peak = self._worst(lambda run, count: encode_peak(stages, sizes, run, entry, count), frames)
        return self._memory(stages, sizes, peak + (entry if self.model.patch > 1 else 0))

    @cached_property
    def whole_memory(self) -> Memory:
        stages = self.whole
        heights, widths = self._levels
        start = 0 if self.direction == "decode" else self.split
        row, column = whole_frame(stages, heights[start], widths[start])
        sizes = combined_sizes((row,), (column,), max)
        item = self.dtype.itemsize
        entry = stages[0].inputs * heights[start] * widths[start] * item
        walk = decode_peak if self.direction == "decode" else encode_peak
        return self._memory(stages, sizes, self._worst(lambda run, count: walk(stages, sizes, run, entry, count), 1))

    def _worst(self, walk: Callable[[Run, int], int], frames: int) -> int:
        """Bytes of activations in the long run. The first frame goes alone: on the CPU PyTorch may compute its
        convolutions by itself where it leaves larger ones to oneDNN, and then it is the worst."""
        run = Run(self.chunk, self.dtype.itemsize, self.device == "cpu", self.channels_last)
        worst = walk(run, frames)
        return max(worst, walk(replace(run, chunk=1), 1)) if run.cpu else worst

    def _memory(self, stages: Sequence[Stage], sizes: Sequence[StageSizes], activations: int) -> Memory:
        item = self.dtype.itemsize
        workspace = 0
        if self.device == "cuda":
            workspace = library_bytes(self.chunk, channels_last=self.channels_last)
            if item == 2 and not self.channels_last:
                workspace += turned_elements(stages, sizes, self.chunk) * item
        return Memory(
            self.model.elements(self.direction) * item,
            cache_elements(stages, sizes) * item,
            scratch_elements(stages, sizes, self.chunk) * item,
            activations,
            workspace,
            waiting_bytes(self.feature_bytes, HOST_BYTES) if self.device == "cpu" else 0,
        )

    @cached_property
    def _levels(self) -> tuple[list[int], list[int]]:
        """Positions before each stage, and after the last, along both axes."""
        height, width = self.entry_sizes
        return level_sizes(self.stages, height), level_sizes(self.stages, width)

    def _overhead(self, rows: Sequence[AxisTile], columns: Sequence[AxisTile]) -> float:
        row, column = whole_frame(self.stages, *self.entry_sizes)
        every = combined_sizes((row,), (column,), max)
        own = combined_sizes(rows, columns, sum)
        mixed = [*every[: self.split], *own] if self.direction == "decode" else [*own, *every[self.split :]]
        frames = self._frames_per_stage()
        return multiplications(self.stages, mixed, frames) / multiplications(self.stages, every, frames)

    def _frames_per_stage(self) -> list[float]:
        """Frames that each stage takes for one frame of the first stage's input, in the long run."""
        factors = [1.0]
        for stage in self.stages[:-1]:
            factor = 1.0
            if stage.up and stage.up.time:
                factor = stage.up.time.outputs / stage.up.time.inputs
            elif stage.down and stage.down.time:
                factor = 1 / stage.down.time.stride[0]
            factors.append(factors[-1] * factor)
        return factors
