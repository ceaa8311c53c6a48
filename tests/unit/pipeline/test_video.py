"""The MP4 is whole or not there."""

import os
import subprocess
from pathlib import Path

import av
import pytest
import torch

from wanfit.errors import InputError, OutputError
from wanfit.pipeline.video import Audio, VideoWriter

FRAMES = torch.stack([torch.full((32, 64, 3), 40 * index, dtype=torch.uint8) for index in range(5)])


def writer(path: Path, frames: int = 5) -> VideoWriter:
    return VideoWriter(path, width=64, height=32, fps=16, num_frames=frames)


def test_frames_come_back_in_order(tmp_path):
    with writer(tmp_path / "a.mp4") as video:
        video.write(FRAMES[:2])
        video.write(FRAMES[2:])
    with av.open(str(tmp_path / "a.mp4")) as container:
        assert float(container.streams.video[0].average_rate) == 16
        levels = [frame.to_ndarray(format="rgb24").mean() for frame in container.decode(video=0)]
    # x264 at CRF 17 and the RGB-YUV conversion move a flat grey by a few levels.
    assert levels == pytest.approx([0, 40, 80, 120, 160], abs=5)


def test_colours_come_back_and_are_said_to_be_bt709(tmp_path):
    colour = torch.tensor([200, 40, 90], dtype=torch.uint8)
    with writer(tmp_path / "a.mp4") as video:
        video.write(colour.expand(5, 32, 64, 3))
    with av.open(str(tmp_path / "a.mp4")) as container:
        codec = container.streams.video[0].codec_context
        assert (codec.colorspace, codec.color_primaries, codec.color_trc, codec.color_range) == (1, 1, 1, 1)
        middle = next(container.decode(video=0)).to_ndarray(format="rgb24")[16, 32]
    assert middle.tolist() == pytest.approx(colour.tolist(), abs=3)


@pytest.mark.parametrize(("rate", "seconds"), [(44100, 1.0), (44100, 0.1), (12345, 1.0)])
def test_sound_goes_beside_the_frames_and_ends_with_them(tmp_path, rate, seconds):
    """A rate that AAC does not know is resampled; AAC's frames of 1024 samples round the length up."""
    tone = torch.sin(torch.arange(int(rate * seconds)) * (440 * 6.2832 / rate)).expand(2, -1)
    video = VideoWriter(tmp_path / "a.mp4", width=64, height=32, fps=16, num_frames=5, audio=Audio(tone, rate))
    with video:
        video.write(FRAMES)
    with av.open(str(tmp_path / "a.mp4")) as container:
        sound = container.streams.audio[0]
        frames = [frame.to_ndarray() for frame in container.decode(sound)]
        assert sound.layout.name == "stereo" and sound.rate == (44100 if rate == 44100 else 48000)
        length = sum(part.shape[1] for part in frames) / sound.rate
    assert length == pytest.approx(min(seconds, 5 / 16), abs=2 * 1024 / 44100)
    assert 0.5 < max(abs(part).max() for part in frames) < 1.5


@pytest.mark.parametrize("waveform", [torch.zeros(3, 10), torch.zeros(10), torch.tensor([[0.0, float("nan")]])])
def test_sound_that_cannot_be_encoded(waveform):
    with pytest.raises(InputError, match="audio_invalid"):
        Audio(waveform, 44100)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupt_leaves_nothing_and_keeps_the_older_file(tmp_path, error):
    (tmp_path / "a.mp4").write_bytes(b"older")
    with pytest.raises(error), writer(tmp_path / "a.mp4") as video:
        video.write(FRAMES)
        raise error
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]
    assert (tmp_path / "a.mp4").read_bytes() == b"older"


def test_wrong_suffix_missing_folder_and_a_folder_as_output_are_refused(tmp_path):
    (tmp_path / "dir.mp4").mkdir()
    for path, said in [
        (tmp_path / "a.avi", "does not end in .mp4"),
        (tmp_path / "none" / "a.mp4", "does not exist"),
        (tmp_path / "dir.mp4", "is a folder"),
    ]:
        with pytest.raises(OutputError, match=said), writer(path):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dir.mp4"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_said_before_any_work(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(OutputError, match="Permission denied"), writer(tmp_path / "a.mp4"):
        raise AssertionError


def test_the_unfinished_file_is_there_from_the_start(tmp_path):
    with writer(tmp_path / "a.mp4") as video:
        (unfinished,) = tmp_path.iterdir()
        assert unfinished.name.endswith(".part.mp4")
        video.write(FRAMES)


def test_too_little_space_is_said_before_any_work(tmp_path):
    with pytest.raises(OutputError, match="MiB free"), writer(tmp_path / "a.mp4", frames=10**12):
        pass
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fills_up_while_writing(tmp_path):
    mounted = (
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(tmp_path)], capture_output=True, check=False
        )
        if os.name == "posix"
        else None
    )
    if mounted is None or mounted.returncode:
        pytest.skip("a small file system can only be mounted by root on Linux")
    try:
        noise = torch.randint(0, 255, (30, 128, 128, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        video = VideoWriter(tmp_path / "a.mp4", width=128, height=128, fps=16, num_frames=30)
        with pytest.raises(OutputError, match=r"after \d+ of 30 frames"), video:
            for _ in range(40):
                video.write(noise)
        assert not list(tmp_path.iterdir())
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
