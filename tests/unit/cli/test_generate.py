"""The main job from the command line: a video, a report, a chart; and what an interrupt leaves."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from wanfit.checkpoint import VARIANTS
from wanfit.checkpoint.reader import Checkpoint
from wanfit.cli.main import main
from wanfit.memory import machine
from wanfit.pipeline import generate
from wanfit.pipeline.files import find_model
from wanfit.pipeline.placement import choose_placement
from wanfit.pipeline.request import Request
from wanfit.tiny.models import write_tiny_models

BOAT = Path(__file__).resolve().parents[3] / "assets" / "boat.jpg"


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_models(root)
    return root


def command(models, out: Path, *more: str) -> list[str]:
    size = ["--width", "96", "--height", "64", "--frames", "9", "--steps", "4"]
    inputs = ["--model", str(models), "--image", str(BOAT), "--prompt", "a boat"]
    return ["generate", *inputs, *size, "--out", str(out), *more]


def frames_of(path: Path) -> np.ndarray:
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24").astype(float) for frame in container.decode(video=0)])


def test_an_image_and_a_prompt_become_a_video_with_a_report(models, tmp_path, capfd):
    report, chart = tmp_path / "report.json", tmp_path / "memory.png"
    assert main(command(models, tmp_path / "a.mp4", "--report", str(report), "--chart", str(chart))) == 0
    with av.open(str(tmp_path / "a.mp4")) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 9 and frames[0].shape == (64, 96, 3)
    assert frames[0].std() > 1, "the frames are not one flat colour"
    said = json.loads(report.read_text(encoding="utf-8"))
    stages = [stage["name"] for stage in said["memory"]["stages"]]
    assert stages == ["text", "encode image", "denoise high", "denoise low", "decode and save"]
    assert all(stage["rss_peak"] >= stage["rss_before"] > 0 for stage in said["memory"]["stages"])
    assert said["settings"]["high_steps"] == 2 and said["settings"]["seed"] == 0
    assert [item["expert"] for item in said["transformers"]] == ["high", "low"]
    assert Image.open(chart).size[0] > 600
    printed = capfd.readouterr().out
    assert "stage: denoise high" in printed and "stage: denoise low" in printed
    assert "4 steps (2 high, 2 low; boundary 0.9)" in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "memory.png", "report.json"]


def test_json_goes_to_stdout_alone_and_the_same_seed_gives_the_same_file(models, tmp_path, capfd):
    reports = []
    for name in ("a", "b"):
        assert main(command(models, tmp_path / f"{name}.mp4", "--json", "--frames", "5")) == 0
        reports.append(json.loads(capfd.readouterr().out))
    assert reports[0]["settings"]["num_frames"] == 5
    assert (tmp_path / "a.mp4").read_bytes() == (tmp_path / "b.mp4").read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="a process of its own cannot be sent Ctrl-C alone on Windows")
@pytest.mark.parametrize(
    ("stage", "sent", "code", "word"),
    [
        ("denoise high", signal.SIGINT, 130, "interrupted"),
        ("decode and save", signal.SIGINT, 130, "interrupted"),
        ("denoise high", signal.SIGTERM, 143, "terminated"),
    ],
)
def test_ctrl_c_and_sigterm_leave_no_half_video_and_what_was_reached(models, tmp_path, stage, sent, code, word):
    length = ("--frames", "5", "--steps", "200") if "denoise" in stage else ("--frames", "17", "--steps", "2")
    arguments = command(models, tmp_path / "a.mp4", *length)
    process = subprocess.Popen(
        [sys.executable, "-m", "wanfit", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # As a terminal starts it: a test run in the background ignores SIGINT, and so would its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    for line in process.stdout:
        if line.strip() == f"stage: {stage}":
            break
    kept = tmp_path / "a.resume.safetensors"
    while process.poll() is None and not kept.exists():
        time.sleep(0.01)
    time.sleep(0.1)
    process.send_signal(sent)
    told, said = process.communicate(timeout=60)
    assert process.returncode == code, said
    assert f"wanfit: {word}" in said and "Traceback" not in said
    assert f"the same command with --resume {kept} goes on from there" in told
    assert [path.name for path in tmp_path.iterdir()] == [kept.name]


@pytest.mark.skipif(os.name == "nt", reason="a pipe ends in another way on Windows")
def test_who_reads_the_output_may_go(models, tmp_path):
    """As `wanfit generate ... | head -1` does: the video is still made."""
    process = subprocess.Popen(
        [sys.executable, "-m", "wanfit", *command(models, tmp_path / "a.mp4", "--frames", "5", "--steps", "2")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.readline()
    process.stdout.close()
    said = process.stderr.read()
    assert "Traceback" not in said and "BrokenPipe" not in said
    assert process.wait(60) in (0, 141) and (tmp_path / "a.mp4").exists()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_help_where_the_output_takes_few_characters(encoding):
    """A pipe on Windows, the C locale: the Chinese words must not end the command."""
    done = subprocess.run(
        [sys.executable, "-m", "wanfit", "generate", "--help"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": encoding},
        check=False,
    )
    assert done.returncode == 0 and b"--chart" in done.stdout and not done.stderr


@pytest.mark.skipif(os.name == "nt", reason="no kill -9 on Windows")
def test_a_killed_run_goes_on_to_the_same_video(models, tmp_path, capfd):
    """kill -9 in the middle: the file from the last step is whole, and the video is the undisturbed one's.

    The latents are equal to the last bit (tests/unit/pipeline/test_resume.py). Another seed is 20 of 255 away.
    """
    more = ("--frames", "5", "--steps", "30")
    assert main(command(models, tmp_path / "whole.mp4", *more)) == 0
    out, kept = tmp_path / "a.mp4", tmp_path / "a.resume.safetensors"
    process = subprocess.Popen(
        [sys.executable, "-m", "wanfit", *command(models, out, *more)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    while process.poll() is None and not kept.exists():
        time.sleep(0.01)
    time.sleep(0.2)
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, "it was finished before it was killed"
    assert kept.exists() and not out.exists()
    capfd.readouterr()
    assert main(command(models, out, *more, "--seed", "1", "--resume", str(kept))) == 2
    assert "seed was 0 and is 1" in capfd.readouterr().err
    assert main([*command(models, out, *more), "--resume", str(kept)]) == 0
    assert "of 30 steps are done" in capfd.readouterr().out
    assert np.abs(frames_of(out) - frames_of(tmp_path / "whole.mp4")).mean() < 3
    assert not kept.exists()


def test_a_run_that_fails_tells_what_it_took(models, tmp_path, capfd, monkeypatch):
    """The decode asks for more than an address space: refused for real, after the denoising."""

    def too_much(*_: object) -> None:
        torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(generate, "decode_to", too_much)
    report = tmp_path / "report.json"
    assert main(command(models, tmp_path / "a.mp4", "--frames", "5", "--report", str(report))) == 3
    told = capfd.readouterr()
    assert "RAM is full in the stage decode and save" in told.err and "steps are kept" in told.err
    assert "stage " in told.out and told.out.count("denoise low") == 2, "once when it began, once in the table"
    said = json.loads(report.read_text(encoding="utf-8"))
    assert said["failure"]["stage"] == "decode and save" and said["failure"]["code"] == "run_failed"
    assert [stage["name"] for stage in said["memory"]["stages"]][-1] == "decode and save"


def test_each_file_of_the_model_is_opened_once(models, tmp_path, monkeypatch):
    opened: list[str] = []
    original = Checkpoint.__init__

    def count(checkpoint: Checkpoint, path: Path, *arguments: object, **options: object) -> None:
        opened.append(str(path))
        original(checkpoint, path, *arguments, **options)

    files = find_model(models)
    monkeypatch.setattr(Checkpoint, "__init__", count)
    request = Request(prompt="a", out=tmp_path / "a.mp4", image=BOAT, width=96, height=64, num_frames=5, steps=2)
    generate.generate(files, request, choose_placement("cpu"), tell=lambda _: None)
    assert sorted(opened) == sorted(str(path) for path in (files.high, files.low, files.text_encoder, files.vae))


def test_an_automatic_size_is_the_plans_and_holds_on_resume(models, tmp_path, capfd, monkeypatch):
    """With 2.2 GiB of RAM to take: an official size, upright for an upright image, told before the run begins."""
    upright = tmp_path / "upright.png"
    Image.open(BOAT).convert("RGB").resize((60, 90)).save(upright)
    monkeypatch.setattr(machine, "available_bytes", lambda: int(2.2 * 2**30))
    command = ["generate", "--model", str(models), "--image", str(upright), "--prompt", "a", "--steps", "2"]
    auto = ["--width", "auto", "--height", "auto", "--out", str(tmp_path / "a.mp4")]

    def stop(*_: object) -> None:  # what follows would take minutes
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_announce", stop)
    assert main([*command, *auto]) == 130
    said = capfd.readouterr().out
    found = re.search(r"size: (\d+)x(\d+), (\d+) frames, the most that fits 2.20 GiB of RAM", said)
    assert found, said
    width, height, frames = map(int, found.groups())
    assert (width, height) in VARIANTS["i2v-a14b"].sizes and height > width and frames % 4 == 1
    assert main([*command, *auto, "--prefer", "length", "--frames", "81"]) == 130
    shorter = re.search(r"size: (\d+)x(\d+), (\d+) frames", capfd.readouterr().out)
    assert shorter and int(shorter[3]) == 81 and int(shorter[1]) <= width


def test_resume_and_save_every_that_cannot_be(models, tmp_path, capfd):
    for more, said in (
        (("--resume", str(tmp_path / "no.safetensors")), "does not exist"),
        (("--resume", str(BOAT)), "holds no progress"),
        (("--save-every", "-1"), "--save-every is -1"),
    ):
        assert main(command(models, tmp_path / "a.mp4", *more)) == 2
        assert said in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["inspect", "plan", "generate", "doctor", "tiny"])
def test_help_is_in_english_and_chinese(capsys, name):
    """Each option: its English words, then Chinese ones."""
    with pytest.raises(SystemExit):
        main([name, "--help"])
    options = capsys.readouterr().out.split("options:\n")[1]
    texts = re.split(r"\n  (?=--)", options)[1:]
    assert texts
    for text in texts:
        assert any("\u4e00" <= letter <= "\u9fff" for letter in text), text
