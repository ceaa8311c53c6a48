"""Which part of each stage a tile has to compute: derived from the kernels, paddings and factors of the stages.

A tile owns a core of the last stage's positions. Walking the stages backwards gives what it needs of each
stage's input: every convolution widens the need by its reach, every change of resolution scales it, and the
frame clips it. A window edge at the frame's edge is zero-padded by the convolutions as in the model; at any
other edge the padding is wrong, but what it spoils lies outside the need and is cut away before the next
stage. All tiles of a grid get windows of one size, so that buffers are reused.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import TilingError
from .layers import Conv, Stage, VaeModel, convs_of

Interval = tuple[int, int]


@dataclass(frozen=True)
class AxisWindow:
    """Along one axis, for one stage: the input window, and the part whose resolution is changed.

    Args:
        window: positions of the stage's input.
        resampled: positions of the stage's input that enter the up- or downsampling; equals `window` without.
        output: positions of the stage's output that come out; equals `resampled` without a change.
    """

    window: Interval
    resampled: Interval
    output: Interval


@dataclass(frozen=True)
class AxisTile:
    """One tile along one axis: its core and its window in each tiled stage."""

    core: Interval
    stages: tuple[AxisWindow, ...]


def reach(convs: Sequence[Conv], axis: int) -> tuple[int, int]:
    """Positions that a run of stride-1 convolutions sees before and after each position; axis 0 rows, 1 columns."""
    before = sum(conv.pad[2 - 2 * axis] for conv in convs)
    after = sum(conv.kernel[1 + axis] - 1 - conv.pad[2 - 2 * axis] for conv in convs)
    return before, after


def level_sizes(stages: Sequence[Stage], size: int) -> list[int]:
    """Positions along an axis before each stage, and after the last."""
    sizes = [size]
    for stage in stages:
        if stage.up:
            size *= stage.up.factor
        elif stage.down:
            size //= stage.down.factor
        sizes.append(size)
    return sizes


def _main_path(stage: Stage) -> list[Conv]:
    """The stage's convolutions before its change of resolution; a shortcut of 1x1 reaches nowhere."""
    layers = stage.layers[:-1] if stage.up or stage.down else stage.layers
    return [conv for layer in layers for conv in convs_of(layer)]


def axis_tiles(stages: Sequence[Stage], size: int, cuts: Sequence[Interval], axis: int) -> tuple[AxisTile, ...]:
    """The tiles along one axis (0 rows, 1 columns).

    Args:
        stages: the stages that are tiled, in the order they run.
        size: positions of the first stage's input along the axis.
        cuts: cores, in positions of the last stage's output; together the whole axis.
    """
    sizes = level_sizes(stages, size)
    reaches = _reaches(stages, axis)
    needs = [_needs(stages, sizes, core, reaches) for core in cuts]
    chosen: list[list[AxisWindow]] = [[] for _ in cuts]
    available = [(0, size)] * len(cuts)
    for index, stage in enumerate(stages):
        unit = stage.down.factor if stage.down else 1
        windows = _equal([need[index].window for need in needs], available, unit)
        if not (stage.up or stage.down):
            for tile, window in zip(chosen, windows, strict=True):
                tile.append(AxisWindow(window, window, window))
            available = windows
            continue
        if stage.up:
            factor = stage.up.factor
            inner = _equal([need[index].resampled for need in needs], windows, 1)
            outputs = [(a * factor, b * factor) for a, b in inner]
        else:
            cells = [(math.ceil(a / unit), b // unit) for a, b in windows]
            wanted = [need[index].resampled for need in needs]
            outputs = _equal([(a // unit, b // unit) for a, b in wanted], cells, 1)
            inner = [(a * unit, b * unit) for a, b in outputs]
        for tile, window, part, output in zip(chosen, windows, inner, outputs, strict=True):
            tile.append(AxisWindow(window, part, output))
        available = outputs
    return tuple(AxisTile(core, tuple(tile)) for core, tile in zip(cuts, chosen, strict=True))


def _reaches(stages: Sequence[Stage], axis: int) -> list[tuple[Interval, Interval]]:
    """Of each stage along an axis: how far its main path sees, and how far its change of resolution does."""
    found: list[tuple[Interval, Interval]] = []
    for stage in stages:
        change = (0, 0)
        if stage.up:
            change = reach([stage.up.conv], axis)
        elif stage.down:
            factor, conv = stage.down.factor, stage.down.conv
            left = conv.pad[2 - 2 * axis]
            right = conv.kernel[1 + axis] - factor - left
            change = math.ceil(left / factor), math.ceil(right / factor)
        found.append((reach(_main_path(stage), axis), change))
    return found


def _needs(
    stages: Sequence[Stage], sizes: Sequence[int], core: Interval, reaches: Sequence[tuple[Interval, Interval]]
) -> list[AxisWindow]:
    """The least that one tile needs, stage by stage."""
    need = core
    found: list[AxisWindow] = []
    for index in range(len(stages) - 1, -1, -1):
        stage, size = stages[index], sizes[index]
        path, (before, after) = reaches[index]
        output = need
        if stage.up:
            fine = _clip((need[0] - before, need[1] + after), sizes[index + 1])
            need = (fine[0] // stage.up.factor, math.ceil(fine[1] / stage.up.factor))
        elif stage.down:
            factor = stage.down.factor
            cells = _clip((need[0] - before, need[1] + after), sizes[index + 1])
            need = (cells[0] * factor, cells[1] * factor)
        resampled = need
        unit = stage.down.factor if stage.down else 1
        window = (need[0] - path[0], need[1] + path[1])
        window = (window[0] // unit * unit, math.ceil(window[1] / unit) * unit)
        need = _clip(window, size)
        found.insert(0, AxisWindow(need, resampled, output))
    return found


def halo(stages: Sequence[Stage], axis: int, index: int) -> Interval:
    """How far stage `index`'s window reaches beyond a core inside a large frame: before, after.

    In positions of the core, rounded up where the stage is finer than the core.
    """
    far = 1024
    levels = level_sizes(stages, far)
    ratio = levels[-1] / far
    core = (round(far * ratio) // 2, round(far * ratio) // 2 + 16)
    window = _needs(stages, levels, core, _reaches(stages, axis))[index].window
    scale = levels[-1] / levels[index if index >= 0 else len(stages) + index]
    return math.ceil(core[0] - window[0] * scale), math.ceil(window[1] * scale - core[1])


def _clip(interval: Interval, size: int) -> Interval:
    return max(interval[0], 0), min(interval[1], size)


def _equal(needs: Sequence[Interval], available: Sequence[Interval], unit: int) -> list[Interval]:
    """Each need widened to the size of the largest where what is available allows it; in steps of `unit`."""
    length = max(b - a for a, b in needs)
    result: list[Interval] = []
    for (a, _), (low, high) in zip(needs, available, strict=True):
        end = min(a + length, high // unit * unit)
        result.append((max(end - length, math.ceil(low / unit) * unit), end))
    return result


def balanced_cuts(size: int, count: int, halo: tuple[int, int]) -> tuple[Interval, ...]:
    """Cores of `count` tiles whose windows, with `halo` positions before and after inside the frame, are equal.

    Tiles at the frame's edge have a halo on one side only, so their cores are larger. Equal cores where the
    halo is too large for that.

    Raises: TilingError tile_invalid: more tiles than positions.
    """
    if count < 1 or count > size:
        raise TilingError(
            "tile_invalid",
            "plan",
            f"<grid> asks for {count} tiles along an axis of {size} positions",
            "Use a coarser <grid>",
        )
    before, after = halo
    window = (size + (before + after) * (count - 1)) / count
    edges = [0.0]
    for index in range(count):
        own = window - (before if index else 0) - (after if index < count - 1 else 0)
        edges.append(edges[-1] + own)
    marks = [round(edge) for edge in edges]
    if any(b - a < 1 for a, b in itertools.pairwise(marks)):
        marks = [size * index // count for index in range(count + 1)]
    marks[-1] = size
    return tuple(itertools.pairwise(marks))


def whole_frame(stages: Sequence[Stage], height: int, width: int) -> tuple[AxisTile, AxisTile]:
    """The one tile that is the whole frame, for stages whose input has this size."""
    row, column = (
        axis_tiles(stages, size, [(0, level_sizes(stages, size)[-1])], axis)[0]
        for axis, size in enumerate((height, width))
    )
    return row, column


def frames_between(stages: Sequence[Stage], frames: int) -> int:
    """Frames that leave `stages` when `frames` enter: the first stays one."""
    for stage in stages:
        if stage.up and stage.up.time:
            frames = 1 + (frames - 1) * (stage.up.time.outputs // stage.up.time.inputs)
        elif stage.down and stage.down.time:
            frames = 1 + (frames - 1) // stage.down.time.stride[0]
    return frames


def decoded_size(model: VaeModel, latent_shape: Sequence[int]) -> tuple[int, int, int]:
    """Frames, height and width in pixels that latents (B,C,T,h,w) become."""
    _, _, frames, height, width = latent_shape
    rows, columns = (level_sizes(model.decoder, size)[-1] * model.patch for size in (height, width))
    return frames_between(model.decoder, frames), rows, columns


def time_step(stages: Sequence[Stage]) -> int:
    """Frames that enter an encoder for one frame that leaves it, after the first."""
    return math.prod(stage.down.time.stride[0] for stage in stages if stage.down and stage.down.time)
