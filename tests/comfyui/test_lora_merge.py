"""The headless host's LoRAs against ComfyUI's own merge of the same files, for each kind."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from comfyui_server import Tree
from tiny_run import latents_of, placement_on_cpu, relative_error, settings_for

from wanfit.pipeline.files import ModelFiles
from wanfit.pipeline.loras import LoraChoice
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.lora import lora_tensors, write_lora
from wanfit.tiny.models import tiny_transformer, tiny_vae

MERGE = Path(__file__).parents[1] / "support" / "comfy_merge.py"
BOUND = 1e-4  # required; measured 1e-6: both add in float32
CASES = {
    "low rank": {"kinds": ("low rank",)},
    "low rank, PEFT names, no alpha": {"kinds": ("low rank",), "dialect": "diffusion_model, PEFT", "alpha": None},
    "low rank, kohya names": {"kinds": ("low rank",), "dialect": "kohya"},
    "low rank, Fun names": {"kinds": ("low rank",), "dialect": "Fun"},
    "whole alpha": {"kinds": ("low rank",), "alpha": 3, "alpha_dtype": torch.int64},
    "diff": {"kinds": ("diff",)},
    "diff_b": {"kinds": ("diff_b",)},
    "all of them in bf16": {"kinds": ("low rank", "diff", "diff_b"), "dtype": torch.bfloat16},
}
STRENGTH = 0.7


@pytest.fixture(scope="module")
def merged(tree: Tree, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model, the LoRAs, and what ComfyUI makes of them."""
    folder = tmp_path_factory.mktemp("merge")
    weights = tiny_transformer("t2v-a14b", seed=1)
    model = write_plain(folder / "wan2.2_t2v_high.safetensors", weights, dtype=torch.float32)
    write_plain(folder / "vae.safetensors", tiny_vae(base_dim=8), dtype=torch.float32)
    jobs = []
    for name, options in CASES.items():
        lora = write_lora(folder / f"{name}.safetensors", lora_tensors(weights, size=0.5, **options))
        jobs.append([str(model), str(lora), STRENGTH, str(folder / f"wan2.2_t2v_merged {name}.safetensors")])
    (folder / "cases.json").write_text(json.dumps(jobs), encoding="utf-8")
    ran = subprocess.run(
        [tree.python, MERGE, folder / "cases.json"], cwd=tree.root, capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_run_with_a_lora_equals_a_run_of_the_merged_model(merged: Path, name: str) -> None:
    def run(model: str, *loras: LoraChoice) -> torch.Tensor:
        path = merged / model
        files = ModelFiles(path, path, merged / "none", merged / "vae.safetensors")
        return latents_of(files, settings_for(files, merged / "a.mp4"), placement_on_cpu(), loras=loras)

    expected = run(f"wan2.2_t2v_merged {name}.safetensors")
    actual = run("wan2.2_t2v_high.safetensors", LoraChoice(merged / f"{name}.safetensors", STRENGTH, "both"))
    print(f"{name}: relative error {relative_error(actual, expected):.1e}")
    assert relative_error(run("wan2.2_t2v_high.safetensors"), expected) > 0.01
    assert relative_error(actual, expected) < BOUND
