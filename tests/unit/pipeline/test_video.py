"""The MP4 is whole or not there."""

import os
import subprocess
from pathlib import Path

import av
import pytest
import torch

from wanfit.errors import OutputError
from wanfit.pipeline.video import VideoWriter

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
