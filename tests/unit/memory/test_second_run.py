"""The second run of a process needs what the first needed, and both leave nothing behind."""

from __future__ import annotations

import gc

import psutil
import torch
from alloc_tracker import peak_bytes
from tiny_run import latents_of, placement_on_cpu, settings_for

from wanfit.memory.release import SCOPES, purge
from wanfit.pipeline.files import ModelFiles
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.models import tiny_transformer, tiny_vae

CPU = torch.device("cpu")


def test_peak_and_what_stays(tmp_path):
    write_plain(tmp_path / "vae.safetensors", tiny_vae(base_dim=8), dtype=torch.float32)
    for seed, name in ((1, "high"), (2, "low")):
        weights = tiny_transformer("t2v-a14b", seed=seed)
        write_plain(tmp_path / f"wan2.2_t2v_{name}_noise.safetensors", weights, dtype=torch.float32)
    high, low = (tmp_path / f"wan2.2_t2v_{name}_noise.safetensors" for name in ("high", "low"))
    files = ModelFiles(high, low, tmp_path / "vae.safetensors", tmp_path / "vae.safetensors")
    settings = settings_for(files, tmp_path / "a.mp4", width=192, height=128, num_frames=17)

    def run() -> None:
        latents_of(files, settings, placement_on_cpu())

    run()  # what is made once for the process
    purge(CPU, list(SCOPES))
    before = psutil.Process().memory_info().rss
    peaks = [peak_bytes(run) for _ in range(2)]
    gc.collect()
    purge(CPU, list(SCOPES))
    after = psutil.Process().memory_info().rss
    print(f"peaks {peaks}, resident set {after / before:.3f} of before")
    assert peaks[1] <= 1.02 * peaks[0]
    assert after <= 1.05 * before
