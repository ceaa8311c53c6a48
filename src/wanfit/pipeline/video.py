"""The finished video, frame by frame into an MP4 that appears only when it is whole."""

from __future__ import annotations

import contextlib
import os
import shutil
from fractions import Fraction
from pathlib import Path
from types import TracebackType

import av
import numpy as np
import torch

from ..errors import OutputError

CODEC = "libx264"
# A generous bound of what x264 writes at CRF 17 for noise; a video of real pictures takes a tenth of it.
BYTES_PER_PIXEL = 0.5


class VideoWriter:
    """Writes frames to `path` through a temporary file beside it; use as a context manager.

    Entering makes the temporary file, so an output that cannot be written is found before any work is
    done. Leaving normally renames it to `path`; leaving with an exception, also Ctrl-C, removes it.

    Args:
        path: where the video goes; must end in .mp4. An existing file is replaced at the end.
        width, height: pixels, even. fps: frames a second. num_frames: for the check of free space.
    Raises:
        OutputError: wrong suffix, folder missing or unwritable, too little space before or while writing.
    """

    def __init__(self, path: Path, *, width: int, height: int, fps: int, num_frames: int) -> None:
        self.path, self.width, self.height, self.fps, self.num_frames = path, width, height, fps, num_frames
        self.frames_written = 0
        self._temporary = path.with_name(f".{path.stem}.{os.getpid()}.part.mp4")

    def __enter__(self) -> VideoWriter:
        if self.path.suffix.lower() != ".mp4":
            raise OutputError(
                "output_unwritable",
                "input",
                f"<out> is {self.path}, which does not end in .mp4",
                f"Use {self.path.with_suffix('.mp4')}",
            )
        folder = self.path.parent
        if not folder.is_dir():
            raise OutputError(
                "output_unwritable",
                "input",
                f"the folder {folder} of <out> does not exist",
                "Create it first",
            )
        if self.path.is_dir():
            raise OutputError("output_unwritable", "input", f"<out> {self.path} is a folder", "Give the name of a file")
        needed = int(self.width * self.height * self.num_frames * BYTES_PER_PIXEL)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OutputError(
                "output_unwritable",
                "input",
                f"{folder} has {free / 2**20:.1f} MiB free; a video of {self.num_frames} frames of "
                f"{self.width}x{self.height} may need {needed / 2**20:.1f} MiB",
                "Free some space or write <out> to another disk",
            )
        try:
            self._container = av.open(str(self._temporary), "w", format="mp4")
        except OSError as error:
            raise self._failure("input", error) from error
        self._stream = self._container.add_stream(CODEC, rate=Fraction(self.fps), options={"crf": "17"})
        self._stream.width, self._stream.height = self.width, self.height
        self._stream.pix_fmt = "yuv420p"
        return self

    def write(self, frames: torch.Tensor) -> None:
        """Append frames: (T, H, W, 3) uint8 on the CPU, RGB."""
        for picture in np.asarray(frames):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            self._mux(frame)
            self.frames_written += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._mux(None)
                self._close()
                self._temporary.replace(self.path)
        finally:
            if self._temporary.exists():
                if error is not None:
                    # On a full disk closing fails too; the first error is the one to report.
                    with contextlib.suppress(OSError):
                        self._container.close()
                self._temporary.unlink()

    def _mux(self, frame: av.VideoFrame | None) -> None:
        try:
            for packet in self._stream.encode(frame):
                self._container.mux(packet)
        except OSError as error:
            raise self._failure("save", error) from error

    def _close(self) -> None:
        try:
            self._container.close()
        except OSError as error:
            raise self._failure("save", error) from error

    def _failure(self, stage: str, error: OSError) -> OutputError:
        reason = error.strerror or str(error)
        return OutputError(
            "output_unwritable",
            stage,
            f"{self.path} cannot be written after {self.frames_written} of {self.num_frames} frames: {reason}",
            "Check the folder's permissions and free space, or give another <out>",
        )
