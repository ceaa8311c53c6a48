"""The finished video, frame by frame into an MP4 that appears only when it is whole."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any

import av
import numpy as np
import torch

from ..errors import InputError, OutputError
from .outputs import check_output, unfinished

CODEC = "libx264"
# With x264's macroblock tree small noisy frames gave two or three files from one input; without it always the same.
_OPTIONS = {"crf": "17", "x264-params": "mbtree=0"}
_LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}
_AUDIO_RATE = 48000
_BT709 = 1  # of FFmpeg's lists of matrices, primaries and transfers alike
_LIMITED = 1
# A generous bound of what x264 writes at CRF 17 for noise; a video of real pictures takes a tenth of it.
BYTES_PER_PIXEL = 0.5


@dataclass(frozen=True)
class Audio:
    """Sound of a video: `waveform` (channels, samples) in [-1, 1], 1, 2 or 6 channels.

    Raises: InputError audio_invalid: other channels, or values that are not finite.
    """

    waveform: torch.Tensor
    sample_rate: int

    def __post_init__(self) -> None:
        shape = tuple(self.waveform.shape)
        if len(shape) != 2 or shape[0] not in _LAYOUTS or not bool(torch.isfinite(self.waveform).all()):
            said = (
                f"has shape {shape}" if len(shape) != 2 or shape[0] not in _LAYOUTS else "holds NaN or infinite values"
            )
            raise InputError("audio_invalid", "input", f"<audio> {said}", "Give 1, 2 or 6 channels of finite samples")


class VideoWriter:
    """Writes frames to `path` through a temporary file beside it; use as a context manager.

    Entering makes the temporary file, so an output that cannot be written is found before any work is
    done. Leaving normally renames it to `path`; leaving with an exception, also Ctrl-C, removes it.

    Args:
        path: where the video goes; must end in .mp4. An existing file is replaced at the end.
        width, height: pixels, even. fps: frames a second. num_frames: for the check of free space.
        audio: goes beside the frames as AAC, and ends with them.
    Raises:
        OutputError: wrong suffix, folder missing or unwritable, too little space before or while writing.
    """

    def __init__(
        self,
        path: Path,
        *,
        width: int,
        height: int,
        fps: int | Fraction,
        num_frames: int,
        audio: Audio | None = None,
    ) -> None:
        self.path, self.width, self.height, self.num_frames = path, width, height, num_frames
        self.fps, self.audio = Fraction(fps), audio
        self.frames_written = 0
        self._samples_written = 0
        self._temporary = unfinished(path)

    def __enter__(self) -> VideoWriter:
        check_output("out", self.path, ".mp4")
        folder = self.path.parent
        needed = int(self.width * self.height * self.num_frames * BYTES_PER_PIXEL)
        free = shutil.disk_usage(folder).free
        if free < needed:
            raise OutputError(
                "output_unwritable",
                "input",
                f"{folder} has {free / 2**20:.1f} MiB free; a video of {self.num_frames} frames of "
                f"{self.width}x{self.height} may need {needed / 2**20:.1f} MiB",
                "Free some space, or put <out> on another disk",
            )
        self._container = av.open(str(self._temporary), "w", format="mp4")
        self._stream = self._container.add_stream(CODEC, rate=self.fps, options=_OPTIONS)
        self._stream.width, self._stream.height = self.width, self.height
        self._stream.pix_fmt = "yuv420p"
        codec = self._stream.codec_context
        codec.color_primaries = codec.color_trc = codec.colorspace = _BT709
        codec.color_range = _LIMITED
        if self.audio is not None:
            rates = av.Codec("aac", "w").audio_rates or []
            rate = self.audio.sample_rate if self.audio.sample_rate in rates else _AUDIO_RATE
            self._sound = self._container.add_stream("aac", rate=rate, layout=_LAYOUTS[self.audio.waveform.shape[0]])
        try:
            self._container.start_encoding()  # PyAV opens the file only now
        except OSError as error:
            raise self._failure("input", error) from error
        return self

    def write(self, frames: torch.Tensor) -> None:
        """Append frames: (T, H, W, 3) uint8 on the CPU, RGB."""
        for picture in np.asarray(frames):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            self._mux(self._stream, frame.reformat(format="yuv420p", dst_colorspace=_BT709))
            self.frames_written += 1
            if self.audio is not None:
                self._write_sound(self.audio)

    def _write_sound(self, audio: Audio) -> None:
        """All samples up to the end of the frames written so far."""
        end = int(self.frames_written / self.fps * audio.sample_rate)
        part = audio.waveform[:, self._samples_written : end].float().cpu().contiguous().numpy()
        if not part.shape[1]:
            return
        frame = av.AudioFrame.from_ndarray(part, format="fltp", layout=_LAYOUTS[part.shape[0]])
        frame.sample_rate, frame.pts = audio.sample_rate, self._samples_written
        self._mux(self._sound, frame)
        self._samples_written += part.shape[1]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._mux(self._stream, None)
                if self.audio is not None:
                    self._mux(self._sound, None)
                self._close()
                self._temporary.replace(self.path)
        finally:
            if self._temporary.exists():
                if error is not None:
                    # On a full disk closing fails too; the first error is the one to report.
                    with contextlib.suppress(OSError):
                        self._container.close()
                self._temporary.unlink()

    def _mux(self, stream: Any, frame: av.VideoFrame | av.AudioFrame | None) -> None:
        try:
            for packet in stream.encode(frame):
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
            "Check the folder's permissions and free space, or put <out> elsewhere",
        )
