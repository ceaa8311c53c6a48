"""Tile plans: which grid, where the tiling starts, and what it will take. Pure functions of module tree and size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..errors import BudgetError, InputError, TilingError
from .adapters import describe
from .conv3d import trap_here
from .footprint import (
    StageSizes,
    cache_elements,
    combined_sizes,
    decode_peak,
    encode_peak,
    library_workspace,
    multiplications,
    scratch_elements,
)
from .layers import Stage, VaeModel, modules_of
from .spool import HOST_BYTES
from .windows import AxisTile, Interval, axis_tiles, balanced_cuts, halo, level_sizes

GIB = 1024**3
MAX_CUTS = 24
"""Tiles along one axis, at most, in a grid that the planner chooses."""


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on the compute device at the worst moment, by cause.

    Args:
        weights: of the half of the VAE that runs, in the plan's dtype.
        histories: frames that causal convolutions keep.
        prepared: the buffer for the input of the running convolution.
        activations: everything else that layers allocate; features and pixels on their way included.
        workspace: estimate of what the convolution library asks for; 0 on CPU.
    """

    weights: int
    histories: int
    prepared: int
    activations: int
    workspace: int

    @property
    def total(self) -> int:
        return self.weights + self.histories + self.prepared + self.activations + self.workspace


@dataclass(frozen=True)
class TilePlan:
    """How one decode or encode is cut. Build with `plan_decode` or `plan_encode`.

    Args:
        direction: `decode` or `encode`.
        shape: of the latents (decode) or of the video (encode): (B, C, T, H, W).
        dtype: that the VAE computes in.
        device: kind of device: `cpu`, `cuda`.
        rows, columns: tiles along each axis; cores in positions of the outermost stage's output (decode) or of
            the whole-frame part's input (encode).
        split: index of the first tiled stage (decode) or of the first stage on the whole frame (encode).
        chunk: frames at a time at every resolution.
        channels_last: activations channels last.
        fold_time: 3D convolutions of one new frame run as 2D ones.
        overhead: multiply-adds against the untiled run: 1.08 is 8 % more.
        memory: at the worst moment, weights included.
        feature_bytes: host memory (or file) for the features between whole-frame part and tiles.
    """

    direction: str
    shape: tuple[int, int, int, int, int]
    dtype: torch.dtype
    device: str
    rows: tuple[AxisTile, ...]
    columns: tuple[AxisTile, ...]
    split: int
    chunk: int
    channels_last: bool
    fold_time: bool
    overhead: float
    memory: Memory
    feature_bytes: int

    @property
    def grid(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @property
    def tiles(self) -> int:
        return len(self.rows) * len(self.columns)

    @property
    def predicted_bytes(self) -> int:
        return self.memory.total


DecodePlan = TilePlan
EncodePlan = TilePlan


@dataclass(frozen=True)
class _Job:
    """All that a plan depends on except the cuts and the split."""

    model: VaeModel
    direction: str
    shape: tuple[int, int, int, int, int]
    dtype: torch.dtype
    device: str
    chunk: int
    channels_last: bool
    fold_time: bool

    @property
    def stages(self) -> tuple[Stage, ...]:
        return self.model.decoder if self.direction == "decode" else self.model.encoder

    @property
    def sizes(self) -> tuple[int, int]:
        """Height and width of the first stage's input."""
        patch = self.model.patch if self.direction == "encode" else 1
        return self.shape[3] // patch, self.shape[4] // patch


def plan_decode(
    vae: Any,
    latent_shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    budget_bytes: int | None = None,
    grid: tuple[int, int] | None = None,
    start: int | None = None,
    chunk: int | None = None,
    channels_last: bool = False,
    host_bytes: int = HOST_BYTES,
) -> TilePlan:
    """The plan for decoding latents of `latent_shape` (B,C,T,h,w). `vae` may be on the meta device.

    Args:
        budget_bytes: device memory for the decoder's weights and everything that decoding allocates; the grid
            of fewest tiles that fits is chosen.
        grid: (rows, columns) of tiles instead; without either the frame is one tile.
        start: up blocks that run on the whole frame; by default the one with the least arithmetic whose features
            fit `host_bytes`.
        chunk: frames at a time; less is less memory. By default 4 on the CPU (as the models do), else 2.

    Raises:
        BudgetError budget_exceeded: no grid fits; says the smallest that would.
        TilingError latent_invalid, tile_invalid.
    """
    model = describe(vae)
    shape = _checked_latents(model, latent_shape)
    job = _job(model, "decode", shape, dtype, device, chunk, channels_last)
    last = len(model.decoder) - 1
    if start is not None and not 0 <= start < last:
        raise TilingError(
            "tile_invalid", "plan", f"<start> is {start}; the VAE has {last} up blocks", f"Use 0 to {last - 1}"
        )
    if start is not None:
        splits = [start + 1]
    else:
        splits = [s for s in range(1, last) if _feature_bytes(job, s) <= host_bytes] or [1]
    return _choose(job, splits, budget_bytes, grid)


def plan_encode(
    vae: Any,
    video_shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    budget_bytes: int | None = None,
    grid: tuple[int, int] | None = None,
    chunk: int | None = None,
    channels_last: bool = False,
) -> TilePlan:
    """The plan for encoding a video of `video_shape` (B,3,F,H,W); as `plan_decode`.

    All stages up to the last change of resolution are tiled, the rest runs on the whole frame.
    """
    model = describe(vae)
    shape = _checked_video(model, video_shape)
    job = _job(model, "encode", shape, dtype, device, chunk, channels_last)
    split = max(index for index, stage in enumerate(model.encoder) if stage.down) + 1
    return _choose(job, [split], budget_bytes, grid)


def tighter(vae: Any, plan: TilePlan) -> TilePlan | None:
    """The plan with every tile halved along its longer side; None when tiles are as small as their halo."""
    model = describe(vae)
    job = _Job(
        model,
        plan.direction,
        plan.shape,
        plan.dtype,
        plan.device,
        plan.chunk,
        plan.channels_last,
        plan.fold_time,
    )
    rows, columns = [tile.core for tile in plan.rows], [tile.core for tile in plan.columns]
    reach = [sum(halo(_tiled(job, plan.split), axis, _inner(job))) for axis in (0, 1)]
    tall, wide = (max(b - a for a, b in cores) for cores in (rows, columns))
    if max(tall - reach[0], wide - reach[1]) <= 1:
        return None
    if tall - reach[0] > wide - reach[1]:
        rows = _halved(rows)
    else:
        columns = _halved(columns)
    return _build(job, plan.split, rows, columns)


def _halved(cores: Sequence[Interval]) -> list[Interval]:
    halves: list[Interval] = []
    for a, b in cores:
        middle = (a + b + 1) // 2
        halves += [(a, middle), (middle, b)] if a < middle < b else [(a, b)]
    return halves


def _job(
    model: VaeModel,
    direction: str,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device | str,
    chunk: int | None,
    channels_last: bool,
) -> _Job:
    target = torch.device(device)
    trap = bool(trap_here(target, dtype))
    frames = chunk if chunk is not None else (4 if target.type == "cpu" else 1 if trap else 2)
    if frames not in (1, 2, 4):
        raise InputError("number_invalid", "plan", f"<chunk> is {frames}", "Use 1, 2 or 4")
    fold = trap and frames == 1 and not channels_last
    return _Job(model, direction, shape, dtype, target.type, frames, channels_last, fold)


def _choose(job: _Job, splits: Sequence[int], budget: int | None, grid: tuple[int, int] | None) -> TilePlan:
    if grid is not None or budget is None:
        return min((_cut(job, split, grid or (1, 1)) for split in splits), key=lambda plan: plan.overhead)
    fitting = [plan for split in splits if (plan := _first_fit(job, split, budget)) is not None]
    if fitting:
        return min(fitting, key=lambda plan: (plan.tiles, plan.overhead))
    floor = min((_floor(job, split) for split in splits), key=lambda plan: plan.predicted_bytes)
    factor = math.prod(stage.up.factor for stage in job.stages if stage.up) * job.model.patch
    if job.direction == "encode":
        factor = 1
    height, width = job.shape[3] * factor, job.shape[4] * factor
    raise BudgetError(
        "budget_exceeded",
        job.direction,
        f"The VAE needs at least {floor.predicted_bytes / GIB:.2f} GiB to {job.direction} {width}x{height} "
        f"(weights {floor.memory.weights / GIB:.2f}, {floor.grid[0]}x{floor.grid[1]} tiles); "
        f"<budget_bytes> is {budget / GIB:.2f} GiB",
        "Give more memory, or use a smaller <width> and <height>",
    )


def _grids(job: _Job, split: int) -> Iterator[tuple[int, int]]:
    """All grids, fewest tiles first; of equal ones, cuts along the longer side first."""
    height, width = _core_sizes(job, split)
    most_rows, most_columns = min(MAX_CUTS, height), min(MAX_CUTS, width)
    every = [(r, c) for r in range(1, most_rows + 1) for c in range(1, most_columns + 1)]
    return iter(sorted(every, key=lambda grid: (grid[0] * grid[1], abs(height / grid[0] - width / grid[1]))))


def _first_fit(job: _Job, split: int, budget: int) -> TilePlan | None:
    weigh = _scale(job, split)
    for rows, columns in _grids(job, split):
        if weigh(rows, columns) <= budget:
            return _cut(job, split, (rows, columns))
    return None


def _floor(job: _Job, split: int) -> TilePlan:
    weigh = _scale(job, split)
    return _cut(job, split, min(_grids(job, split), key=lambda grid: (weigh(*grid), grid[0] * grid[1])))


def _scale(job: _Job, split: int) -> Callable[[int, int], int]:
    """Predicted bytes of a grid; what depends on one axis only is computed once."""
    whole = _whole_memory(job, split)

    @cache
    def along(axis: int, count: int) -> tuple[AxisTile, ...]:
        return _axis(job, split, axis, _cuts(job, split, axis, count))

    return lambda rows, columns: (
        max(whole, _tile_memory(job, split, along(0, rows), along(1, columns)), key=lambda memory: memory.total).total
    )


def _cut(job: _Job, split: int, grid: tuple[int, int]) -> TilePlan:
    return _build(job, split, *(_cuts(job, split, axis, count) for axis, count in enumerate(grid)))


def _cuts(job: _Job, split: int, axis: int, count: int) -> Sequence[Interval]:
    return balanced_cuts(_core_sizes(job, split)[axis], count, halo(_tiled(job, split), axis, _inner(job)))


def _tiled(job: _Job, split: int) -> tuple[Stage, ...]:
    return job.stages[split:] if job.direction == "decode" else job.stages[:split]


def _whole(job: _Job, split: int) -> tuple[Stage, ...]:
    return job.stages[:split] if job.direction == "decode" else job.stages[split:]


def _inner(job: _Job) -> int:
    """Position among the tiled stages of the one at full resolution, whose windows should be equal."""
    return -1 if job.direction == "decode" else 0


def _sizes_at(job: _Job, split: int) -> tuple[list[int], list[int]]:
    """Positions before each stage, and after the last, along both axes."""
    height, width = job.sizes
    return level_sizes(job.stages, height), level_sizes(job.stages, width)


def _core_sizes(job: _Job, split: int) -> tuple[int, int]:
    rows, columns = _sizes_at(job, split)
    end = -1 if job.direction == "decode" else split
    return rows[end], columns[end]


def _axis(job: _Job, split: int, axis: int, cuts: Sequence[Interval]) -> tuple[AxisTile, ...]:
    start = split if job.direction == "decode" else 0
    return axis_tiles(_tiled(job, split), _sizes_at(job, split)[axis][start], cuts, axis)


def whole_frame(stages: Sequence[Stage], height: int, width: int) -> tuple[AxisTile, AxisTile]:
    """The one tile that is the whole frame, for stages whose input has this size."""
    row, column = (
        axis_tiles(stages, size, [(0, level_sizes(stages, size)[-1])], axis)[0]
        for axis, size in enumerate((height, width))
    )
    return row, column


def _build(job: _Job, split: int, row_cuts: Sequence[Interval], column_cuts: Sequence[Interval]) -> TilePlan:
    rows, columns = _axis(job, split, 0, row_cuts), _axis(job, split, 1, column_cuts)
    memory = max(_whole_memory(job, split), _tile_memory(job, split, rows, columns), key=lambda memory: memory.total)
    return TilePlan(
        job.direction,
        job.shape,
        job.dtype,
        job.device,
        rows,
        columns,
        split,
        job.chunk,
        job.channels_last,
        job.fold_time,
        _overhead(job, split, rows, columns),
        memory,
        _feature_bytes(job, split),
    )


def _overhead(job: _Job, split: int, rows: Sequence[AxisTile], columns: Sequence[AxisTile]) -> float:
    height, width = job.sizes
    full = whole_frame(job.stages, height, width)
    frames = _frames_per_stage(job)
    untiled = multiplications(job.stages, combined_sizes((full[0],), (full[1],), max), frames)
    own = combined_sizes(rows, columns, sum)
    every = combined_sizes((full[0],), (full[1],), max)
    mixed = [*every[:split], *own] if job.direction == "decode" else [*own, *every[split:]]
    return multiplications(job.stages, mixed, frames) / untiled


def _frames_per_stage(job: _Job) -> list[float]:
    """Frames that each stage takes for one frame of the first stage's input, in the long run."""
    factors = [1.0]
    for stage in job.stages[:-1]:
        factor = 1.0
        if stage.up and stage.up.time:
            factor = stage.up.time.outputs / stage.up.time.inputs
        elif stage.down and stage.down.time:
            factor = 1 / stage.down.time.stride[0]
        factors.append(factors[-1] * factor)
    return factors


def frames_between(stages: Sequence[Stage], frames: int) -> int:
    """Frames that leave `stages` when `frames` enter: the first stays one."""
    for stage in stages:
        if stage.up and stage.up.time:
            frames = 1 + (frames - 1) * (stage.up.time.outputs // stage.up.time.inputs)
        elif stage.down and stage.down.time:
            frames = 1 + (frames - 1) // stage.down.time.stride[0]
    return frames


def time_step(stages: Sequence[Stage]) -> int:
    """Frames that enter an encoder for one frame that leaves it, after the first."""
    return math.prod(stage.down.time.stride[0] for stage in stages if stage.down and stage.down.time)


def _feature_bytes(job: _Job, split: int) -> int:
    """Bytes of what lies between the whole-frame part and the tiles, all frames of one batch item."""
    rows, columns = _sizes_at(job, split)
    first = job.stages[split]
    frames = frames_between(job.stages[:split], job.shape[2])
    return first.inputs * frames * rows[split] * columns[split] * job.dtype.itemsize


def _weights(job: _Job) -> int:
    modules = {id(module): module for module in modules_of(job.stages)}
    return sum(p.numel() for module in modules.values() for p in module.parameters()) * job.dtype.itemsize


def _memory(job: _Job, stages: Sequence[Stage], sizes: Sequence[StageSizes], activations: int, extra: int) -> Memory:
    item = job.dtype.itemsize
    half = job.device == "cuda" and item == 2 and not job.channels_last
    return Memory(
        _weights(job),
        cache_elements(stages, sizes) * item,
        scratch_elements(stages, sizes, job.chunk) * item,
        activations + extra,
        library_workspace(stages, sizes, job.chunk) * item if half else 0,
    )


def _tile_memory(job: _Job, split: int, rows: Sequence[AxisTile], columns: Sequence[AxisTile]) -> Memory:
    stages, sizes = _tiled(job, split), combined_sizes(rows, columns, max)
    heights, widths = _sizes_at(job, split)
    item = job.dtype.itemsize
    cpu = job.device == "cpu"
    height, width = (max(b - a for a, b in (tile.core for tile in tiles)) for tiles in (rows, columns))
    if job.direction == "decode":
        features = stages[0].inputs * job.chunk * heights[split] * widths[split] * item
        peak = decode_peak(stages, sizes, job.chunk, item, features, cpu, job.chunk)
        # the emitted frames: clamped in the dtype, then in float32, then in the sink's dtype
        pixels = job.model.channels * job.model.patch**2 * job.chunk * height * width * (2 * item + 8)
        return _memory(job, stages, sizes, peak, pixels)
    frames = time_step(stages)
    window = sizes[0].window[0] * sizes[0].window[1]
    entry = stages[0].inputs * frames * window * item
    peak = encode_peak(stages, sizes, job.chunk, item, entry, frames, cpu)
    return _memory(job, stages, sizes, peak, entry if job.model.patch > 1 else 0)


def _whole_memory(job: _Job, split: int) -> Memory:
    stages = _whole(job, split)
    heights, widths = _sizes_at(job, split)
    start = 0 if job.direction == "decode" else split
    row, column = whole_frame(stages, heights[start], widths[start])
    sizes = combined_sizes((row,), (column,), max)
    item = job.dtype.itemsize
    entry = stages[0].inputs * heights[start] * widths[start] * item
    cpu = job.device == "cpu"
    if job.direction == "decode":
        return _memory(job, stages, sizes, decode_peak(stages, sizes, job.chunk, item, entry, cpu, 1), 0)
    return _memory(job, stages, sizes, encode_peak(stages, sizes, job.chunk, item, entry, 1, cpu), 0)


def _checked_latents(model: VaeModel, shape: Sequence[int]) -> tuple[int, int, int, int, int]:
    sizes = tuple(shape)
    if len(sizes) != 5 or min(sizes) < 1 or sizes[1] != model.latent_channels:
        raise TilingError(
            "latent_invalid",
            "decode",
            f"<latents> has shape {sizes}; this VAE decodes (B, {model.latent_channels}, T, h, w)",
            "Use the VAE that belongs to the transformer: 16 channels are Wan 2.1 and 2.2 A14B, 48 Wan 2.2 5B",
        )
    return sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]


def _checked_video(model: VaeModel, shape: Sequence[int]) -> tuple[int, int, int, int, int]:
    sizes = tuple(shape)
    if len(sizes) != 5 or min(sizes) < 1 or sizes[1] != model.channels:
        raise InputError(
            "image_invalid",
            "encode",
            f"<video> has shape {sizes}; this VAE encodes (B, {model.channels}, F, H, W)",
            "Give frames with these channels",
        )
    multiple = model.patch * math.prod(stage.down.factor for stage in model.encoder if stage.down)
    if sizes[3] % multiple or sizes[4] % multiple:
        raise InputError(
            "size_invalid",
            "encode",
            f"<height> x <width> is {sizes[3]} x {sizes[4]}",
            f"Use multiples of {multiple}",
        )
    step = time_step(model.encoder)
    if (sizes[2] - 1) % step:
        raise InputError("frames_invalid", "encode", f"<num_frames> is {sizes[2]}", f"Use {step}n+1, such as 81")
    return sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
