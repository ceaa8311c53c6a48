"""Runs a list of stages over one window of the frame, frame by frame in time, with its own causal history."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from .footprint import cache_elements, cache_shapes, scratch_elements
from .layers import Attention, Conv, Downsample, Layer, Norm, Plain, Residual, Stage, Upsample
from .ops import (
    WeightReader,
    add_repeated,
    attend,
    mean_of_groups,
    norm_into,
    repeated_channels,
)
from .stage_sizes import StageSizes, combined_sizes
from .windows import AxisTile, Interval

Box = list[torch.Tensor]
"""Holds one tensor for its taker: popping it leaves no reference behind."""


@dataclass(frozen=True)
class Settings:
    """How stages are run.

    Args:
        chunk: frames at a time in every stage, at most.
        channels_last: layout of the activations in memory.
        fold_time: compute a 3D convolution of one new frame as a 2D one (channels first, chunk 1 only).
        read: gives the weights of a convolution.
    """

    chunk: int
    channels_last: bool
    fold_time: bool
    read: WeightReader


class Workspace:
    """The two buffers that all tiles of a grid share: histories, and the input of the running convolution."""

    def __init__(self, cache: int, scratch: int, dtype: torch.dtype, device: torch.device) -> None:
        self.cache = torch.empty(cache, dtype=dtype, device=device)
        self.scratch = torch.empty(scratch, dtype=dtype, device=device)

    @staticmethod
    def for_tiles(
        stages: Sequence[Stage],
        rows: Sequence[AxisTile],
        columns: Sequence[AxisTile],
        chunk: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Workspace:
        """Large enough for every tile of the grid."""
        sizes = combined_sizes(rows, columns, max)
        return Workspace(cache_elements(stages, sizes), scratch_elements(stages, sizes, chunk), dtype, device)


class StageRunner:
    """One pass in time over one tile: `decode` for chains of up stages, `encode` for down stages.

    Feed the first frame alone, then at most `settings.chunk` frames a call.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        rows: AxisTile,
        columns: AxisTile,
        workspace: Workspace,
        settings: Settings,
    ) -> None:
        self.stages, self.rows, self.columns = tuple(stages), rows, columns
        self.settings, self.workspace = settings, workspace
        self.query_rows = 0
        sizes = [StageSizes.of(row, column) for row, column in zip(rows.stages, columns.stages, strict=True)]
        self._history: dict[Conv, torch.Tensor] = {}
        used = 0
        for conv, (channels, frames, height, width) in cache_shapes(self.stages, sizes).items():
            count = channels * frames * height * width
            self._history[conv] = self._shaped(workspace.cache[used : used + count], channels, frames, height, width)
            used += count
        workspace.cache[:used].zero_()
        self._started: set[Layer] = set()
        self._orders: dict[Stage, torch.Tensor] = {}

    # ---- decode -------------------------------------------------------------------------------------------

    def decode(self, x: torch.Tensor, emit: Callable[[torch.Tensor], None]) -> None:
        """Runs frames `x` (1,C,t,h,w), the first stage's window, through all stages.

        `emit` gets (1,C,n,H,W), cut to the core, in order of time, n at most the chunk.
        """
        self._push(0, [x], emit)

    def _push(self, index: int, box: Box, emit: Callable[[torch.Tensor], None]) -> None:
        last = index == len(self.stages) - 1
        for result in self._up_stage(index, box):
            if last:
                emit(
                    _crop(
                        result.pop(),
                        self.rows.stages[-1].output,
                        self.columns.stages[-1].output,
                        self.rows.core,
                        self.columns.core,
                    )
                )
            else:
                result.append(self._enter(index, result.pop()))
                self._push(index + 1, result, emit)

    def _enter(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """The next stage's window of this stage's output."""
        row, column = self.rows.stages, self.columns.stages
        return _crop(x, row[index].output, column[index].output, row[index + 1].window, column[index + 1].window)

    def _up_stage(self, index: int, box: Box) -> Iterator[Box]:
        stage = self.stages[index]
        x = box.pop()
        around = x if stage.shortcut else None
        for layer in stage.layers[:-1] if stage.up else stage.layers:
            x = self._layer(layer, x)
        if not stage.up:
            yield [x]
            return
        row, column = self.rows.stages[index], self.columns.stages[index]
        x = _crop(x, row.window, column.window, row.resampled, column.resampled)
        if around is not None:
            around = _crop(around, row.window, column.window, row.resampled, column.resampled)
        first = stage.up not in self._started
        self._started.add(stage.up)
        doubled = stage.up.time is not None and not first
        if stage.up.time is not None and not first:
            x = self._temporal(stage.up.time, x)
        repeat = stage.up.time.outputs // stage.up.time.inputs if doubled and stage.up.time else 1
        channels = x.shape[1] // repeat
        frames = x.shape[2] * repeat
        for start in range(0, frames, self.settings.chunk):
            numbers = range(start, min(start + self.settings.chunk, frames))
            sources = [x[0, channels * (n % repeat) : channels * (n % repeat + 1), n // repeat] for n in numbers]
            out = self._enlarge(stage.up, sources)
            if stage.shortcut and around is not None:
                order = self._order(stage, x.device)
                for position, n in enumerate(numbers):
                    phase = n % repeat if doubled else stage.shortcut.factor_t - 1
                    add_repeated(out[0, :, position], around[0, :, n // repeat], stage.shortcut, phase, order)
            result = [out]
            del out, sources
            yield result

    def _order(self, stage: Stage, device: torch.device) -> torch.Tensor:
        if stage not in self._orders and stage.shortcut:
            self._orders[stage] = repeated_channels(stage.shortcut, device)
        return self._orders[stage]

    def _enlarge(self, up: Upsample, sources: list[torch.Tensor]) -> torch.Tensor:
        """Frames (C,h,w), each repeated in space and convolved: (1, C', n, f*h, f*w)."""
        channels, height, width = sources[0].shape
        factor, count = up.factor, len(sources)
        flat = self.workspace.scratch[: count * channels * height * width * factor**2]
        if self.settings.channels_last:
            cells = flat.view(count, height, factor, width, factor, channels)
            for cell, source in zip(cells, sources, strict=True):
                cell.copy_(source.permute(1, 2, 0)[:, None, :, None])
            large = flat.view(count, height * factor, width * factor, channels).permute(0, 3, 1, 2)
        else:
            cells = flat.view(count, channels, height, factor, width, factor)
            for cell, source in zip(cells, sources, strict=True):
                cell.copy_(source[:, :, None, :, None])
            large = flat.view(count, channels, height * factor, width * factor)
        return self._conv(up.conv, large).permute(1, 0, 2, 3)[None]

    # ---- encode -------------------------------------------------------------------------------------------

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Runs frames `x` (1,C,t,h,w), the first stage's window, through all stages: (1,C',t',h',w'), the core.

        t is 1 on the first call, then a multiple of the model's step in time.
        """
        for index, stage in enumerate(self.stages):
            step = self.settings.chunk
            if stage.down and stage.down.time:
                step = max(step, stage.down.time.stride[0])
            parts = [self._down_stage(index, part) for part in x.split(step, dim=2)]
            x = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
            del parts
            if index + 1 < len(self.stages):
                x = self._enter(index, x)
        return _crop(x, self.rows.stages[-1].output, self.columns.stages[-1].output, self.rows.core, self.columns.core)

    def _down_stage(self, index: int, x: torch.Tensor) -> torch.Tensor:
        stage = self.stages[index]
        row, column = self.rows.stages[index], self.columns.stages[index]
        around = x if stage.shortcut else None
        for layer in stage.layers[:-1] if stage.down else stage.layers:
            x = self._layer(layer, x)
        if stage.down:
            x = self._shrink(stage.down, _crop(x, row.window, column.window, row.resampled, column.resampled))
        if stage.shortcut and around is not None:
            around = _crop(around, row.window, column.window, row.resampled, column.resampled)
            x = x.add_(mean_of_groups(around, stage.shortcut))
        return x

    def _shrink(self, down: Downsample, x: torch.Tensor) -> torch.Tensor:
        _, channels, count, height, width = x.shape
        left, right, top, bottom = down.conv.pad
        tall, wide = height + top + bottom, width + left + right
        flat = self.workspace.scratch[: count * channels * tall * wide]
        if self.settings.channels_last:
            padded = flat.view(count, tall, wide, channels).permute(0, 3, 1, 2)
        else:
            padded = flat.view(count, channels, tall, wide)
        padded[:, :, top : top + height, left : left + width].copy_(x[0].transpose(0, 1))
        for edge in (
            padded[:, :, :top],
            padded[:, :, tall - bottom :],
            padded[..., :left],
            padded[..., wide - right :],
        ):
            edge.zero_()
        x = self._conv(down.conv, padded, padded=True).permute(1, 0, 2, 3)[None]
        if down.time is None:
            return x
        if down not in self._started:
            self._started.add(down)
            self._history[down.time].copy_(x)
            return x
        return self._temporal(down.time, x)

    # ---- layers -------------------------------------------------------------------------------------------

    def _layer(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        if isinstance(layer, Residual):
            return self._residual(layer, x)
        if isinstance(layer, Attention):
            return attend(layer, x, self._conv, self.query_rows)
        if isinstance(layer, Plain):
            return self._conv(layer.conv, self._input(layer.conv, x, layer.norm))
        raise TypeError(f"{type(layer).__name__} changes the resolution and ends its stage")

    def _residual(self, layer: Residual, x: torch.Tensor) -> torch.Tensor:
        inner = self._conv(layer.conv1, self._input(layer.conv1, x, layer.norm1))
        prepared = self._input(layer.conv2, inner, layer.norm2)
        del inner
        out = self._conv(layer.conv2, prepared)
        return out.add_(self._conv(layer.shortcut, x) if layer.shortcut else x)

    def _temporal(self, conv: Conv, x: torch.Tensor) -> torch.Tensor:
        return self._conv(conv, self._input(conv, x, None))

    def _input(self, conv: Conv, x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
        """[history, x] or [history, SiLU(norm(x))] in the shared buffer; the history moves on."""
        if not conv.history and norm is None:
            return x
        _, channels, frames, height, width = x.shape
        total = frames + conv.history
        flat = self.workspace.scratch[: channels * total * height * width]
        prepared = self._shaped(flat, channels, total, height, width)
        tail = prepared[:, :, conv.history :]
        if norm is None:
            tail.copy_(x)
        else:
            norm_into(x, norm, tail, silu=True)
        if conv.history:
            history = self._history[conv]
            prepared[:, :, : conv.history].copy_(history)
            history.copy_(prepared[:, :, frames:])
        return prepared

    def _shaped(self, flat: torch.Tensor, channels: int, frames: int, height: int, width: int) -> torch.Tensor:
        if self.settings.channels_last:
            return flat.view(1, frames, height, width, channels).permute(0, 4, 1, 2, 3)
        return flat.view(1, channels, frames, height, width)

    def _conv(self, conv: Conv, x: torch.Tensor, *, padded: bool = False) -> torch.Tensor:
        weight, bias = self.settings.read(conv.module, x)
        left, _, top, _ = (0, 0, 0, 0) if padded else conv.pad
        if conv.planar:
            return F.conv2d(x, weight, bias, conv.stride[1:], (top, left))
        if self.settings.fold_time and x.shape[2] == conv.kernel[0]:
            folded = x.reshape(1, -1, *x.shape[3:])
            out = F.conv2d(folded, weight.flatten(1, 2), bias, conv.stride[1:], (top, left))
            return out[:, :, None]
        return F.conv3d(x, weight, bias, conv.stride, (0, top, left))


def _crop(x: torch.Tensor, rows: Interval, columns: Interval, to_rows: Interval, to_columns: Interval) -> torch.Tensor:
    """The part of `x`, which covers (rows, columns), that covers (to_rows, to_columns): a view."""
    return x[
        ...,
        to_rows[0] - rows[0] : to_rows[1] - rows[0],
        to_columns[0] - columns[0] : to_columns[1] - columns[0],
    ]
