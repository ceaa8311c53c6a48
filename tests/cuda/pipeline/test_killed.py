"""kill -9 in the middle of a run on a card; `--resume` goes on to the latents of the undisturbed run, to the last bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
STEPS, KILLED_AFTER = 6, 4
CHILD = f"""
import os, signal, sys
from wanfit.cli.main import main
from wanfit.pipeline.resume import Progress

after_step = Progress.after_step


def until_killed(progress, latents, scheduler):
    latents = after_step(progress, latents, scheduler)
    if progress._done == {KILLED_AFTER}:
        os.kill(os.getpid(), signal.SIGKILL)
    return latents


Progress.after_step = until_killed
sys.exit(main(sys.argv[1:]))
"""


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
    ended = subprocess.run(
        [sys.executable, "-c", CHILD, *command("killed.mp4")], capture_output=True, text=True, check=False, timeout=300
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr[-2000:]
    assert kept.exists() and not (tmp_path / "killed.mp4").exists()

    computed.clear()
    capfd.readouterr()
    assert main(command("killed.mp4", "--resume", str(kept))) == 0
    told = [line for line in capfd.readouterr().out.splitlines() if "resumed" in line]
    with capfd.disabled():
        print("", *told, f"largest difference {float((computed[STEPS] - expected).abs().max())}", sep="\n")
    assert len(told) == 1 and f"{KILLED_AFTER} of {STEPS} steps" in told[0], "no step was lost"
    assert torch.equal(computed[STEPS], expected)
    assert (tmp_path / "killed.mp4").exists() and not kept.exists()
