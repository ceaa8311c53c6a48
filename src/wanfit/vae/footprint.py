"""Memory and arithmetic of running stages over one window: the same walk as `StageRunner`, without tensors.

Counted: everything that goes through PyTorch's allocator. Workspaces that a convolution library asks for are
estimated by the plan, not here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .layers import Attention, Conv, Layer, Plain, Residual, Stage, convs_of
from .stage_sizes import StageSizes


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


_SMALL_CONV = 20480
"""PyTorch computes a float32 3D convolution of fewer input elements (width not counted) on the CPU by itself,
through a matrix of all its input patches, not with oneDNN."""


@dataclass(frozen=True)
class Run:
    """How stages are run, as far as memory goes: frames at a time, bytes of a number, whether on the CPU, and whether
    PyTorch turns the weight of the running convolution to channels last."""

    chunk: int
    itemsize: int
    cpu: bool
    turned: bool = False

    def beside(self, conv: Conv, frames: int, size: tuple[int, int]) -> int:
        """Bytes that a convolution takes beside input and output; `frames` of output."""
        weight = conv.elements * self.itemsize if self.turned else 0
        return weight + (self.patches(conv, frames, size) or self.packed(conv, frames, size))

    def packed(self, conv: Conv, frames: int, size: tuple[int, int]) -> int:
        """Bytes of the input as oneDNN packs it."""
        if not self.cpu or conv.planar:
            return 0
        return conv.inputs * (frames + conv.history) * _area(size) * self.itemsize

    def patches(self, conv: Conv, frames: int, size: tuple[int, int]) -> int:
        """Bytes of the matrix of input patches, where one is made; `frames` of output."""
        large = conv.inputs * (frames + conv.history) * size[0] > _SMALL_CONV
        if conv.planar or large or not self.cpu or self.itemsize < 4:
            return 0
        kernel = conv.kernel[0] * conv.kernel[1] * conv.kernel[2]
        return conv.inputs * kernel * frames * _area(size) * self.itemsize

    def layer(self, layer: Layer, frames: int, size: tuple[int, int]) -> tuple[int, int]:
        """Bytes beyond the layer's input at its worst moment, and of its output. On the CPU, SiLU works on a copy."""
        unit = frames * _area(size) * self.itemsize
        lengths = frames * _area(size) * 4
        if isinstance(layer, Residual):
            inner, out = layer.conv1.outputs * unit, layer.conv2.outputs * unit
            moments = [
                inner + self.beside(layer.conv1, frames, size),
                inner + lengths,
                out + self.beside(layer.conv2, frames, size),
            ]
            if layer.shortcut:
                beside = self.beside(layer.shortcut, frames, size)
                moments.append(out + (layer.shortcut.inputs + layer.shortcut.outputs) * unit + beside)
            if self.cpu:
                moments += [layer.conv1.inputs * unit + lengths, inner + layer.conv2.inputs * unit + lengths]
            return max(moments), out
        if isinstance(layer, Attention):
            return 7 * layer.norm.channels * unit + lengths, layer.proj.outputs * unit
        if isinstance(layer, Plain):
            out = layer.conv.outputs * unit
            copy = layer.conv.inputs * unit if self.cpu and layer.norm else 0
            return max(out + self.beside(layer.conv, frames, size), copy + lengths), out
        return 0, 0


def decode_peak(
    stages: Sequence[Stage], sizes: Sequence[StageSizes], run: Run, entry: int, frames: int, leaving: int = 0
) -> int:
    """Bytes of activations at the worst moment, the first stage's input of `entry` bytes and `frames` frames
    included; without histories and the prepared input. `leaving`: what is made of the result on its way out."""
    held, current, worst = 0, entry, entry
    for stage, size in zip(stages, sizes, strict=True):
        around = current if stage.shortcut else 0
        kept = 0  # the stage's input, once the main path has gone on from it
        for layer in stage.layers[:-1] if stage.up else stage.layers:
            extra, out = run.layer(layer, frames, size.window)
            worst = max(worst, held + kept + current + extra)
            current, kept = out, around
        if stage.up:
            if stage.up.time:
                time = stage.up.time
                out = time.outputs * frames * _area(size.resampled) * run.itemsize
                worst = max(worst, held + kept + current + out + run.beside(time, frames, size.resampled))
                current = out
            held += kept + current
            frames = run.chunk
            current = stage.up.conv.outputs * frames * _area(size.output) * run.itemsize
            worst = max(worst, held + current + run.beside(stage.up.conv, frames, size.output))
            if stage.shortcut:
                repeated = stage.up.conv.outputs * _area(size.resampled) * run.itemsize
                worst = max(worst, held + current + repeated)
        worst = max(worst, held + current)
    return max(worst, held + current + leaving)


def encode_peak(stages: Sequence[Stage], sizes: Sequence[StageSizes], run: Run, entry: int, frames: int) -> int:
    """As `decode_peak`; `frames`: of the first stage's input in one call."""
    current, worst = entry, entry
    for stage, size in zip(stages, sizes, strict=True):
        step = min(_step(stage, run.chunk), frames)
        time = stage.down.time if stage.down and frames > 1 else None  # the first frame passes by itself
        result = stage.outputs * frames * _area(size.output) * run.itemsize // (time.stride[0] if time else 1)
        earlier = result * (frames - step) // frames
        around = stage.inputs * step * _area(size.window) * run.itemsize if stage.shortcut else 0
        inner = 0
        for layer in stage.layers[:-1] if stage.down else stage.layers:
            extra, out = run.layer(layer, step, size.window)
            worst = max(worst, current + earlier + inner + extra)
            inner = out
        if stage.down:
            out = stage.down.conv.outputs * step * _area(size.output) * run.itemsize
            worst = max(worst, current + earlier + inner + out + run.beside(stage.down.conv, step, size.output))
            inner = out
            if time:
                after = time.outputs * (step // time.stride[0]) * _area(size.output) * run.itemsize
                beside = run.beside(time, step // time.stride[0], size.output)
                worst = max(worst, current + earlier + inner + after + beside)
                inner = after
        worst = max(worst, current + earlier + inner + 2 * around)
        if frames > step:
            worst = max(worst, current + 2 * result)
        frames //= time.stride[0] if time else 1
        current = result
    return worst


def library_bytes(chunk: int, *, channels_last: bool) -> int:
    """What convolutions take beyond what is counted here, at most: on one H200, channels last, 480p to 1088p, 18 MiB
    with 1 frame at a time, 18 with 2, 22 with 4. The other layout was given more and has not been measured since."""
    return (16 + 2 * chunk if channels_last else 20 + 14 * chunk) * 1024**2


def turned_elements(stages: Sequence[Stage], sizes: Sequence[StageSizes], chunk: int) -> int:
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
                total += conv.elements * area * times
    return total
