"""kill -9 in the middle of a run on a card; `--resume` goes on to the latents of the undisturbed run, to the last bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from wanfit.cli.main import main
from wanfit.pipeline.resume import Progress
from wanfit.tiny.models import write_tiny_models

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(os.name == "nt", reason="no kill -9 on Windows"),
]
BOAT = Path(__file__).resolve().parents[3] / "assets" / "boat.jpg"
STEPS = 100


def test_a_killed_run_goes_on_to_the_same_latents(tmp_path, monkeypatch, capfd):
    write_tiny_models(tmp_path / "models")

    def command(name: str, *more: str) -> list[str]:
        size = ["--width", "96", "--height", "64", "--frames", "9", "--steps", str(STEPS), "--seed", "3"]
        where = ["--device", "cuda", "--attention", "sdpa", "--out", str(tmp_path / name)]
        given = ["--model", str(tmp_path / "models"), "--image", str(BOAT), "--prompt", "a boat"]
        return ["generate", *given, *size, *where, *more]

    computed: dict[int, torch.Tensor] = {}
    after_step = Progress.after_step

    def watched(progress: Progress, latents: torch.Tensor, scheduler: object) -> torch.Tensor:
        latents = after_step(progress, latents, scheduler)
        computed[progress._done] = latents.detach().cpu().clone()
        return latents

    monkeypatch.setattr(Progress, "after_step", watched)
    assert main(command("whole.mp4")) == 0
    expected = computed[STEPS]

    kept = tmp_path / "killed.resume.safetensors"
    process = subprocess.Popen(
        [sys.executable, "-m", "wanfit", *command("killed.mp4")], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    while process.poll() is None and not kept.exists():
        time.sleep(0.01)
    time.sleep(0.05)
    process.kill()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL, f"it ended before it was killed: {errors.decode()[-2000:]}"
    assert kept.exists() and not (tmp_path / "killed.mp4").exists()

    computed.clear()
    capfd.readouterr()
    assert main(command("killed.mp4", "--resume", str(kept))) == 0
    told = [line for line in capfd.readouterr().out.splitlines() if "resumed" in line]
    with capfd.disabled():
        print("", *told, f"largest difference {float((computed[STEPS] - expected).abs().max())}", sep="\n")
    assert told and torch.equal(computed[STEPS], expected)
    assert (tmp_path / "killed.mp4").exists() and not kept.exists()
