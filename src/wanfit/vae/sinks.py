"""Where finished pixels go: a preallocated buffer, or frame by frame in order to whoever takes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from ..errors import InputError
from .spool import HOST_BYTES, Spool

_DTYPES = (torch.float32, torch.float16, torch.uint8)


@dataclass(frozen=True)
class Rect:
    """A part of the frame, in pixels."""

    top: int
    left: int
    height: int
    width: int


@dataclass(frozen=True)
class PixelFormat:
    """How pixels leave the device: float32 or float16 in [-1, 1] (`unit`: in [0, 1]), or uint8 in 0..255."""

    dtype: torch.dtype
    unit: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise InputError(
                "number_invalid",
                "decode",
                f"<frame_dtype> is {self.dtype}",
                "Use float32, float16 or uint8",
            )

    def convert(self, frames: torch.Tensor) -> torch.Tensor:
        """(1,C,n,H,W) in [-1, 1] to (n,H,W,C). uint8 is rounded as diffusers' video processor does."""
        pixels = frames[0].permute(1, 2, 3, 0)
        if self.dtype == torch.uint8:
            return pixels.float().div_(2).add_(0.5).mul_(255).round_().to(torch.uint8).contiguous()
        if self.unit:
            pixels = pixels.float().add_(1).div_(2)
        return pixels.to(self.dtype).contiguous()


class FrameSink(Protocol):
    """Takes the pixels of a decode, tile after tile, each tile's frames in order of time."""

    @property
    def format(self) -> PixelFormat: ...

    def begin(self, batch: int, frames: int, height: int, width: int, channels: int) -> None:
        """Before anything else: what will come."""
        ...

    def begin_tile(self, item: int, rect: Rect) -> None: ...

    def write(self, frame: int, pixels: torch.Tensor) -> None:
        """Frames `frame`... of the current tile, (n, h, w, C) on the host, valid during the call only."""
        ...

    def end_tile(self, *, complete: bool) -> None:
        """After a tile; when it is not complete, its area comes again, in other tiles."""
        ...


class HostFrames:
    """All frames in one buffer on the host: `frames` (B,F,H,W,C), `video` the same as (B,C,F,H,W)."""

    def __init__(self, dtype: torch.dtype = torch.float32, *, unit: bool = False) -> None:
        self._format = PixelFormat(dtype, unit)
        self.frames = torch.empty(0, dtype=dtype)
        self._item = 0
        self._rect = Rect(0, 0, 0, 0)

    @property
    def format(self) -> PixelFormat:
        return self._format

    @property
    def video(self) -> torch.Tensor:
        return self.frames.permute(0, 4, 1, 2, 3)

    def begin(self, batch: int, frames: int, height: int, width: int, channels: int) -> None:
        with torch.inference_mode(False):  # else the caller could not change the frames in place
            self.frames = torch.empty(batch, frames, height, width, channels, dtype=self._format.dtype)

    def begin_tile(self, item: int, rect: Rect) -> None:
        self._item, self._rect = item, rect

    def write(self, frame: int, pixels: torch.Tensor) -> None:
        place = self.frames[self._item, frame : frame + pixels.shape[0]]
        rows = slice(self._rect.top, self._rect.top + self._rect.height)
        columns = slice(self._rect.left, self._rect.left + self._rect.width)
        place[:, rows, columns].copy_(pixels)

    def end_tile(self, *, complete: bool) -> None:
        return


class OrderedFrames:
    """Hands complete frames to `consume(item, frame, pixels)` in order, as soon as all their tiles are there.

    Tiles run one after the other, each over all of time: only one tile's histories exist, and nothing of the
    device's state is ever moved. So the frames of all tiles but the last wait; with the last tile every frame
    is complete as it comes. Waiting frames take `limit_bytes` of host memory at most, then a temporary file
    (uint8, 1280x720, 481 frames: 1.24 GiB in all). The other order, time outside and tiles inside, would have to
    move every tile's histories for each latent frame: 2 x 4 GiB at 720p, 1 TB for 481 frames.

    Args:
        consume: gets (H,W,C) pixels that are valid during the call only.
        limit_bytes, directory: see `Spool`.
    """

    def __init__(
        self,
        consume: Callable[[int, int, torch.Tensor], None],
        dtype: torch.dtype = torch.uint8,
        *,
        unit: bool = False,
        limit_bytes: int = HOST_BYTES // 2,
        directory: Path | None = None,
    ) -> None:
        self._format = PixelFormat(dtype, unit)
        self._consume = consume
        self._limit, self._directory = limit_bytes, directory
        self._spool: Spool | None = None
        self._canvas = torch.empty(0, dtype=dtype)
        self._done: list[Rect] = []
        self._item, self._next, self._frames = 0, 0, 0
        self._rect = Rect(0, 0, 0, 0)
        self.waiting_file_bytes = 0

    @property
    def format(self) -> PixelFormat:
        return self._format

    def begin(self, batch: int, frames: int, height: int, width: int, channels: int) -> None:
        self._frames = frames
        self._canvas = torch.empty(height, width, channels, dtype=self._format.dtype)
        self._start_item(0)

    def _start_item(self, item: int) -> None:
        if self._spool is not None:
            self._spool.close()
        self._spool = Spool(self._limit, self._directory)
        self._item, self._next = item, 0
        self._done = []

    def begin_tile(self, item: int, rect: Rect) -> None:
        if item != self._item:
            self._start_item(item)
        self._rect = rect

    def write(self, frame: int, pixels: torch.Tensor) -> None:
        covered = sum(rect.height * rect.width for rect in (*self._done, self._rect))
        last = covered == self._canvas.shape[0] * self._canvas.shape[1]
        for offset, picture in enumerate(pixels):
            number = frame + offset
            if number < self._next or self._spool is None:
                continue  # handed over before the tile had to be run again
            if last:
                self._hand_over(number, picture)
            else:
                self._spool.store((self._rect, number), picture)

    def _hand_over(self, number: int, picture: torch.Tensor) -> None:
        for rect in self._done:
            if self._spool is not None:
                part = torch.empty(rect.height, rect.width, self._canvas.shape[2], dtype=self._canvas.dtype)
                self._spool.load((rect, number), part)
                self._place(rect).copy_(part)
        self._place(self._rect).copy_(picture)
        self._consume(self._item, number, self._canvas)
        self._next = number + 1

    def _place(self, rect: Rect) -> torch.Tensor:
        return self._canvas[rect.top : rect.top + rect.height, rect.left : rect.left + rect.width]

    def end_tile(self, *, complete: bool) -> None:
        if complete:
            self._done.append(self._rect)
        if self._spool is not None:
            self.waiting_file_bytes = max(self.waiting_file_bytes, self._spool.file_bytes)

    def close(self) -> None:
        """Gives up what waits; call it when decoding ended, however it did."""
        if self._spool is not None:
            self._spool.close()
            self._spool = None
