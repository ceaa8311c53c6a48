"""Tile plans: which grid, where the tiling starts, and what it will take. Pure functions of module tree and size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..errors import BudgetError, InputError, TilingError
from .adapters import describe
from .conv3d import trap_here
from .job import TileJob
from .layers import VaeModel
from .search import TIME, TileSearch
from .spool import HOST_BYTES
from .tile_plan import TilePlan
from .windows import Interval, time_step

GIB = 1024**3


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
    channels_last: bool | None = None,
    host_bytes: int = HOST_BYTES,
    or_least: bool = False,
) -> TilePlan:
    """The plan for decoding latents of `latent_shape` (B,C,T,h,w). `vae` may be on the meta device.

    Args:
        budget_bytes: device memory for the decoder's weights and everything that decoding allocates; of the grids of
            fewest tiles that fit, one for each `start` and `chunk`, the fastest by estimate is chosen.
        grid: (rows, columns) of tiles instead; without either the frame is one tile.
        start: up blocks that run on the whole frame; by default chosen among those whose features fit `host_bytes`.
        chunk: frames at a time; less is less memory. By default 4 on the CPU (as the models do); on CUDA chosen
            within a budget, 2 without.
        channels_last: by default on CUDA in 16 bit, where convolutions need no turned copies then.
        or_least: where no grid fits, the plan of least memory instead of an error.

    Raises:
        BudgetError budget_exceeded: no grid fits; says the smallest that would.
        TilingError latent_invalid, tile_invalid.
    """
    model = describe(vae)
    shape = _checked_latents(model, latent_shape)
    jobs = _jobs(model, "decode", shape, dtype, device, chunk, channels_last, budgeted=budget_bytes is not None)
    last = len(model.decoder) - 1
    if start is not None and not 0 <= start < last:
        raise TilingError(
            "tile_invalid", "plan", f"<start> is {start}; the VAE has {last} up blocks", f"Use 0 to {last - 1}"
        )
    splits = range(1, last) if start is None else (start + 1,)
    every = [dataclasses.replace(job, split=split) for job in jobs for split in splits]
    held = [job for job in every if job.feature_bytes <= host_bytes]
    fitting = held or [job for job in every if job.split == splits[0]]
    return _choose(fitting, budget_bytes, grid, or_least=or_least)


def plan_encode(
    vae: Any,
    video_shape: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    budget_bytes: int | None = None,
    grid: tuple[int, int] | None = None,
    chunk: int | None = None,
    channels_last: bool | None = None,
    or_least: bool = False,
) -> TilePlan:
    """The plan for encoding a video of `video_shape` (B,3,F,H,W); as `plan_decode`.

    All stages up to the last change of resolution are tiled, the rest runs on the whole frame.
    """
    model = describe(vae)
    shape = _checked_video(model, video_shape)
    jobs = _jobs(model, "encode", shape, dtype, device, chunk, channels_last, budgeted=budget_bytes is not None)
    split = max(index for index, stage in enumerate(model.encoder) if stage.down) + 1
    return _choose([dataclasses.replace(job, split=split) for job in jobs], budget_bytes, grid, or_least=or_least)


def tighter(vae: Any, plan: TilePlan) -> TilePlan | None:
    """The plan with every tile halved along its longer side; None when tiles are as small as their halo."""
    job = TileJob(
        describe(vae),
        plan.direction,
        plan.shape,
        plan.dtype,
        plan.device,
        plan.chunk,
        plan.channels_last,
        plan.fold_time,
        plan.split,
    )
    cores = [[tile.core for tile in tiles] for tiles in (plan.rows, plan.columns)]
    rests = [max(b - a for a, b in along) - sum(job.halo(axis)) for axis, along in enumerate(cores)]
    axis = 0 if rests[0] > rests[1] else 1
    if rests[axis] <= 1:
        return None
    cores[axis] = _halved(cores[axis])
    return job.plan(cores[0], cores[1])


def _halved(cores: Sequence[Interval]) -> list[Interval]:
    halves: list[Interval] = []
    for a, b in cores:
        middle = (a + b + 1) // 2
        halves += [(a, middle), (middle, b)] if a < middle < b else [(a, b)]
    return halves


def _jobs(
    model: VaeModel,
    direction: str,
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    device: torch.device | str,
    chunk: int | None,
    channels_last: bool | None,
    *,
    budgeted: bool,
) -> list[TileJob]:
    """One job for each number of frames at a time that comes into question, all with split 1."""
    target = torch.device(device)
    trap = bool(trap_here(target, dtype))
    if channels_last is None:
        channels_last = target.type == "cuda" and dtype.itemsize == 2 and not trap
    if chunk is not None and chunk not in TIME:
        raise InputError("number_invalid", "plan", f"<chunk> is {chunk}", "Use 1, 2 or 4")
    if chunk is not None:
        chunks = (chunk,)
    elif target.type == "cpu":
        chunks = (4,)
    elif trap:
        chunks = (1,)
    else:
        chunks = (2, 4, 1) if budgeted else (2,)
    return [
        TileJob(
            model,
            direction,
            shape,
            dtype,
            target.type,
            frames,
            channels_last,
            trap and frames == 1 and not channels_last,
            1,
        )
        for frames in chunks
    ]


def _choose(jobs: Sequence[TileJob], budget: int | None, grid: tuple[int, int] | None, *, or_least: bool) -> TilePlan:
    if grid is not None or budget is None:
        rows, columns = grid or (1, 1)
        plans = [job.plan(job.cuts(0, rows), job.cuts(1, columns)) for job in jobs]
        return min(plans, key=lambda plan: plan.overhead)
    search = TileSearch(jobs)
    found = search.fastest(budget)
    if found is not None:
        return found
    floor = search.least()
    if or_least:
        return floor
    model = jobs[0].model
    factor = math.prod(stage.up.factor for stage in model.decoder if stage.up) * model.patch
    height, width = (size * (factor if floor.direction == "decode" else 1) for size in floor.shape[3:])
    raise BudgetError(
        "budget_exceeded",
        floor.direction,
        f"The VAE needs at least {math.ceil(floor.predicted_bytes / GIB * 100) / 100:.2f} GiB to "
        f"{floor.direction} {width}x{height} (weights {floor.memory.weights / GIB:.2f}; "
        f"{floor.grid[0]}x{floor.grid[1]} tiles); <budget_bytes> is {budget / GIB:.2f} GiB",
        "Give more memory, or use a smaller <width> and <height>",
    )


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
