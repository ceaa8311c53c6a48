"""Failures while weights are read, in both experts and at the switch: the same latents, or a stop that goes on to them."""

from __future__ import annotations

import gc
import random

import psutil
import pytest
import torch
from tiny_run import latents_of, placement_on_cpu, settings_for

from wanfit.blocks import lean_block
from wanfit.checkpoint.reader import Checkpoint
from wanfit.memory.explain import explain
from wanfit.memory.purge import trim_heap
from wanfit.pipeline.files import ModelFiles
from wanfit.pipeline.request import Request
from wanfit.pipeline.resume import Progress, beside, facts_of
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.models import tiny_transformer, tiny_vae

STEPS, COUNT = 4, 24
MIB = 2**20


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> ModelFiles:
    root = tmp_path_factory.mktemp("failures")
    write_plain(root / "vae.safetensors", tiny_vae(base_dim=8), dtype=torch.float32)
    for seed, name in ((1, "high"), (2, "low")):
        weights = tiny_transformer("t2v-a14b", seed=seed)
        write_plain(root / f"wan2.2_t2v_{name}_noise.safetensors", weights, dtype=torch.float32)
    high, low = (root / f"wan2.2_t2v_{name}_noise.safetensors" for name in ("high", "low"))
    return ModelFiles(high, low, root / "vae.safetensors", root / "vae.safetensors")


class Fault:
    """Fails at its n-th call: as PyTorch does on a full card, or by an allocation that no machine grants."""

    def __init__(self) -> None:
        self.calls, self.at, self.kind = 0, -1, ""

    def __call__(self) -> None:
        number, self.calls = self.calls, self.calls + 1
        if number == self.at:
            if self.kind == "vram":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")
            torch.empty(2**60, dtype=torch.uint8)  # more than an address space: refused on every machine


def watched(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Fault:
    fault, original = Fault(), getattr(owner, name)

    def call(*arguments: object, **options: object) -> object:
        fault()
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, call)
    return fault


def test_failures_lose_no_step_and_change_no_result(files, tmp_path, monkeypatch):
    reading = watched(monkeypatch, Checkpoint, "load")  # the rest of an expert at the switch, and each block's weights
    computing = watched(monkeypatch, lean_block, "block_forward")
    settings = settings_for(files, tmp_path / "a.mp4", steps=STEPS)
    facts = facts_of(files, Request(prompt="a boat", out=tmp_path / "a.mp4"), settings, placement_on_cpu())

    def run(resume: bool = False) -> tuple[torch.Tensor, Progress]:
        progress = Progress(beside(tmp_path / "a.mp4"), facts, STEPS, lambda _: None)
        if resume:
            progress.resume()
        with progress:
            return latents_of(files, settings, placement_on_cpu(), progress=progress), progress

    expected, _ = run()
    calls = {"reading": reading.calls, "computing": computing.calls}
    chooser = random.Random(0)
    kept, stopped, resident = beside(tmp_path / "a.mp4"), 0, list[int]()
    for number in range(COUNT):
        place, kind = ("reading", "computing")[number % 2], ("vram", "ram")[number // 2 % 2]
        for fault in (reading, computing):
            fault.calls, fault.at = 0, -1
        fault = reading if place == "reading" else computing
        fault.at, fault.kind = chooser.randrange(calls[place]), kind
        try:
            latents, _ = run()
        except (torch.OutOfMemoryError, RuntimeError) as error:
            found = explain(error)
            assert found is not None and found.cause == ("vram full" if kind == "vram" else "host memory full")
            stopped += 1
            fault.at = -1
            latents, progress = run(resume=kept.exists())
            assert progress._done == STEPS
        assert torch.equal(latents, expected), (place, kind, fault.at)
        assert not list(tmp_path.glob("*")), "a complete run leaves nothing"
        gc.collect()
        trim_heap()  # malloc keeps up to 28 MiB of what was freed, more after one run than after the next
        resident.append(psutil.Process().memory_info().rss)
    grown = min(resident[COUNT // 2 :]) - min(resident[COUNT // 4 : COUNT // 2])
    print(f"{stopped} of {COUNT} stopped and went on; resident set {grown / MIB:+.1f} MiB")
    assert COUNT // 4 < stopped < COUNT, "some went on by themselves, in less memory"
    assert grown < 32 * MIB
