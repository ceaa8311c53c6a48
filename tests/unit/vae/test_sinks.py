"""Frames in a buffer, and frames in order through a spool."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from diffusers.video_processor import VideoProcessor
from wan_vaes import Z, random_vae, untiled_decode

from wanfit.errors import InputError, OutputError, TilingError
from wanfit.vae import HostFrames, OrderedFrames, Step, decode, plan_decode
from wanfit.vae.spool import Spool

VAE = random_vae("vae-2.1")
LATENTS = torch.randn(2, Z, 2, 5, 7)
EXPECTED = torch.cat([untiled_decode(VAE, item) for item in LATENTS.split(1)])


def run(sink: HostFrames | OrderedFrames, grid: tuple[int, int] = (2, 2), **options: object) -> None:
    decode(VAE, LATENTS, plan_decode(VAE, LATENTS.shape, dtype=torch.float32, grid=grid), sink, **options)


def test_uint8_is_what_diffusers_would_save() -> None:
    sink = HostFrames(torch.uint8)
    run(sink, (1, 1))
    frames = VideoProcessor().postprocess_video(EXPECTED, output_type="np")
    assert torch.equal(sink.frames, torch.from_numpy((frames * 255).round().astype("uint8")))


def test_float_formats() -> None:
    half, unit = HostFrames(torch.float16), HostFrames(unit=True)
    run(half, (1, 1))
    run(unit, (1, 1))
    assert half.video.dtype == torch.float16 and torch.equal(half.video, EXPECTED.half())
    assert torch.equal(unit.video, (EXPECTED + 1) / 2)


@pytest.mark.parametrize("limit_bytes", [0, 1 << 20])
def test_ordered_frames(limit_bytes: int, tmp_path: Path) -> None:
    """Through a file or not: the same bytes, in order, and while the last tile is still running."""
    whole = HostFrames(torch.uint8)
    run(whole)
    got: list[tuple[int, int]] = []
    at_work: list[Step] = []
    video = torch.zeros_like(whole.frames)

    def consume(item: int, frame: int, pixels: torch.Tensor) -> None:
        got.append((item, frame))
        assert at_work[-1].tile == (1, 1)
        video[item, frame].copy_(pixels)

    sink = OrderedFrames(consume, limit_bytes=limit_bytes, directory=tmp_path)
    run(sink, before_step=at_work.append)
    sink.close()
    frames = EXPECTED.shape[2]
    assert got == [(item, frame) for item in range(2) for frame in range(frames)]
    assert torch.equal(video, whole.frames)
    assert bool(sink.waiting_file_bytes) == (limit_bytes == 0)
    assert not list(tmp_path.iterdir())


def test_spool_keeps_what_it_is_given(tmp_path: Path) -> None:
    tensors = {number: torch.randn(3, number + 1) for number in range(5)}
    with Spool(256, tmp_path) as spool:
        for number, tensor in tensors.items():
            spool.store(number, tensor)
        spool.store(4, -tensors[4])
        assert spool.file_bytes == tensors[4].nbytes  # places of 64 bytes: four fit
        for number, tensor in tensors.items():
            out = torch.empty_like(tensor)
            spool.load(number, out)
            assert torch.equal(out, -tensor if number == 4 else tensor)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with Spool(0, tmp_path / "missing") as spool:
        with pytest.raises(OutputError, match=r"output_unwritable.*missing"):
            spool.store("a", torch.zeros(4))


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are POSIX")
def test_full_disk(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    sink = OrderedFrames(lambda item, frame, pixels: None, limit_bytes=0, directory=tmp_path)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OutputError, match="output_unwritable"):
            run(sink)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sink.close()


def test_refused() -> None:
    with pytest.raises(InputError, match=r"number_invalid.*bfloat16"):
        HostFrames(torch.bfloat16)
    plan = plan_decode(VAE, LATENTS.shape, dtype=torch.float32)
    damaged = LATENTS.clone()
    damaged[0, 0, 0, 0, 0] = float("nan")
    with pytest.raises(TilingError, match=r"latent_invalid.*NaN"):
        decode(VAE, damaged, plan, HostFrames())
    with pytest.raises(TilingError, match=r"latent_invalid.*plan is to decode"):
        decode(VAE, LATENTS[:, :, :1], plan, HostFrames())
