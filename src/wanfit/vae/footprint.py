"""Memory and arithmetic of running stages over one window: the same walk as `StageRunner`, without tensors.

Counted: everything that goes through PyTorch's allocator. Workspaces that a convolution library asks for are
estimated by the plan, not here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .layers import Attention, Conv, Layer, Plain, Residual, Stage, convs_of
from .windows import AxisTile, AxisWindow, Interval


@dataclass(frozen=True)
class StageSizes:
    """Height and width of a stage's input window, of what is resampled of it, and of its output."""

    window: tuple[int, int]
    resampled: tuple[int, int]
    output: tuple[int, int]

    @staticmethod
    def of(row: AxisWindow, column: AxisWindow) -> StageSizes:
        return StageSizes(
            (_length(row.window), _length(column.window)),
            (_length(row.resampled), _length(column.resampled)),
            (_length(row.output), _length(column.output)),
        )


def combined_sizes(
    rows: Sequence[AxisTile], columns: Sequence[AxisTile], pick: Callable[[Iterator[int]], int]
) -> list[StageSizes]:
    """Per stage, `pick` (max or sum) of the tiles' sizes along each axis."""
    found: list[StageSizes] = []
    for index in range(len(rows[0].stages)):
        sizes = [
            tuple(
                pick(b - a for a, b in (getattr(tile.stages[index], part) for tile in tiles))
                for tiles in (rows, columns)
            )
            for part in ("window", "resampled", "output")
        ]
        window, resampled, output = ((size[0], size[1]) for size in sizes)
        found.append(StageSizes(window, resampled, output))
    return found


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]


def _area(size: tuple[int, int]) -> int:
    return size[0] * size[1]


def _step(stage: Stage, chunk: int) -> int:
    """Frames that a stage takes at a time."""
    return max(chunk, stage.down.time.stride[0]) if stage.down and stage.down.time else chunk


def cache_shapes(stages: Sequence[Stage], sizes: Sequence[StageSizes]) -> dict[Conv, tuple[int, int, int, int]]:
    """Shape (channels, frames, height, width) of every convolution's history."""
    shapes: dict[Conv, tuple[int, int, int, int]] = {}
    for stage, size in zip(stages, sizes, strict=True):
        for layer in stage.layers:
            area = size.window
            if layer is stage.up:
                area = size.resampled
            elif layer is stage.down:
                area = size.output
            for conv in convs_of(layer):
                if conv.history:
                    shapes[conv] = (conv.inputs, conv.history, *area)
    return shapes


def cache_elements(stages: Sequence[Stage], sizes: Sequence[StageSizes]) -> int:
    return sum(c * t * h * w for c, t, h, w in cache_shapes(stages, sizes).values())


def scratch_elements(stages: Sequence[Stage], sizes: Sequence[StageSizes], chunk: int) -> int:
    """The largest prepared input of any convolution."""
    largest = 0
    for stage, size in zip(stages, sizes, strict=True):
        frames = _step(stage, chunk)
        for layer in stage.layers:
            if isinstance(layer, Plain | Residual):
                for conv in convs_of(layer):
                    if conv.history or (isinstance(layer, Plain) and layer.norm):
                        largest = max(largest, conv.inputs * (conv.history + frames) * _area(size.window))
        if stage.up:
            largest = max(largest, stage.up.conv.inputs * chunk * _area(size.output))
            if stage.up.time:
                time = stage.up.time
                largest = max(largest, time.inputs * (time.history + chunk) * _area(size.resampled))
        if stage.down:
            left, right, top, bottom = stage.down.conv.pad
            padded = (size.resampled[0] + top + bottom) * (size.resampled[1] + left + right)
            largest = max(largest, stage.down.conv.inputs * frames * padded)
            if stage.down.time:
                time = stage.down.time
                largest = max(largest, time.inputs * (time.history + frames) * _area(size.output))
    return largest


def _layer_peak(layer: Layer, frames: int, area: int, itemsize: int, cpu: bool) -> tuple[int, int]:
    """Bytes beyond the layer's input at its worst moment, and of its output. On the CPU, SiLU works on a copy."""
    unit = frames * area * itemsize
    lengths = frames * area * 4
    if isinstance(layer, Residual):
        inner, out = layer.conv1.outputs * unit, layer.conv2.outputs * unit
        around = (layer.shortcut.inputs + layer.shortcut.outputs) * unit if layer.shortcut else 0
        copies = (layer.conv1.inputs * unit, layer.conv2.inputs * unit + inner) if cpu else (0, 0)
        return max(inner + lengths, out + around, copies[0] + lengths, copies[1] + lengths), out
    if isinstance(layer, Attention):
        return 7 * layer.norm.channels * unit + lengths, layer.proj.outputs * unit
    if isinstance(layer, Plain):
        copy = layer.conv.inputs * unit + lengths if cpu and layer.norm else 0
        return max(layer.conv.outputs * unit, copy), layer.conv.outputs * unit
    return 0, 0


def decode_peak(
    stages: Sequence[Stage],
    sizes: Sequence[StageSizes],
    chunk: int,
    itemsize: int,
    entry: int,
    cpu: bool,
    entering: int,
) -> int:
    """Bytes of activations at the worst moment, the first stage's input of `entry` bytes and `entering` frames
    included; without histories and the prepared input."""
    held, current, worst, frames = 0, entry, entry, entering
    for stage, size in zip(stages, sizes, strict=True):
        around = current if stage.shortcut else 0
        kept = 0  # the stage's input, once the main path has gone on from it
        for layer in stage.layers[:-1] if stage.up else stage.layers:
            extra, out = _layer_peak(layer, frames, _area(size.window), itemsize, cpu)
            worst = max(worst, held + kept + current + extra)
            current, kept = out, around
        if stage.up:
            if stage.up.time:
                out = stage.up.time.outputs * frames * _area(size.resampled) * itemsize
                worst = max(worst, held + kept + current + out)
                current = out
            held += kept + current
            frames = chunk
            current = stage.up.conv.outputs * chunk * _area(size.output) * itemsize
            if stage.shortcut:
                worst = max(worst, held + current + stage.up.conv.outputs * _area(size.resampled) * itemsize)
        worst = max(worst, held + current)
    return worst


def encode_peak(
    stages: Sequence[Stage],
    sizes: Sequence[StageSizes],
    chunk: int,
    itemsize: int,
    entry: int,
    frames: int,
    cpu: bool,
) -> int:
    """As `decode_peak`; `frames`: of the first stage's input in one call."""
    current, worst = entry, entry
    for stage, size in zip(stages, sizes, strict=True):
        step = min(_step(stage, chunk), frames)
        inner, kept = 0, 0
        around = stage.inputs * step * _area(size.window) * itemsize if stage.shortcut else 0
        done = stage.outputs * frames * _area(size.output) * itemsize
        for layer in stage.layers[:-1] if stage.down else stage.layers:
            extra, out = _layer_peak(layer, step, _area(size.window), itemsize, cpu)
            worst = max(worst, current + done + inner + extra)
            inner = out
        if stage.down:
            out = stage.down.conv.outputs * step * _area(size.output) * itemsize
            worst = max(worst, current + done + inner + 2 * out)
        if stage.down and stage.down.time:
            done //= stage.down.time.stride[0]
            frames //= stage.down.time.stride[0]
        worst = max(worst, current + done + kept + 2 * around, current + 2 * done)
        current = done
    return worst


def library_workspace(stages: Sequence[Stage], sizes: Sequence[StageSizes], chunk: int) -> int:
    """Elements of input and output of the largest convolution: cuDNN turns both to channels last and back."""
    largest = 0
    for stage, size in zip(stages, sizes, strict=True):
        for layer in stage.layers:
            area = _area(size.window if layer is not stage.up else size.output)
            for conv in convs_of(layer):
                frames = chunk if conv.planar else chunk + conv.history
                largest = max(largest, (conv.inputs * frames + conv.outputs * chunk) * area)
    return largest


def multiplications(stages: Sequence[Stage], sizes: Sequence[StageSizes], frames: Sequence[float]) -> float:
    """Multiply-adds of the convolutions (attention left out: it is never tiled), `frames` per stage."""
    total = 0.0
    for stage, size, count in zip(stages, sizes, frames, strict=True):
        for layer in stage.layers:
            for conv in convs_of(layer):
                area, times = _area(size.window), count
                if stage.up and layer is stage.up:
                    area = _area(size.resampled if conv is stage.up.time else size.output)
                    if conv is stage.up.conv and stage.up.time:
                        times *= stage.up.time.outputs // stage.up.time.inputs
                elif stage.down and layer is stage.down:
                    area = _area(size.output)
                    times = count / conv.stride[0]
                kernel = conv.kernel[0] * conv.kernel[1] * conv.kernel[2]
                total += conv.inputs * conv.outputs * kernel * area * times
    return total
