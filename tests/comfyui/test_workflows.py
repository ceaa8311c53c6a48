"""Every shipped workflow: runs to a playable video with tiny models in the place of its files, on every core."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from comfy_names import FILE_INPUTS, TEXT, relative_error, tiny_name
from comfy_workflow import load, to_prompt
from comfyui_server import PACK, Server

from wanfit.checkpoint import open_checkpoint
from wanfit.pipeline.text import encode_prompts, load_text_encoder, load_tokenizer

WORKFLOWS = sorted((PACK / "workflows").glob("*.json"))
LENGTH = 5
WITH_TEXT = "wan22_t2v_16gb"  # one with the real text path; its 24 layers are what costs the time on a CPU
COMFY = Path(sys.executable).with_name("comfy")


def tiny_prompt(path: Path, object_info: dict[str, Any]) -> dict[str, Any]:
    prompt = to_prompt(load(path), object_info)
    texts = [key for key, node in prompt.items() if node["class_type"] == "CLIPTextEncode"]
    if path.stem == WITH_TEXT:
        prompt["text"] = {
            "class_type": "TestSaveTensor", "inputs": {"name": "text", "conditioning": [texts.pop(0), 0]}
        }  # fmt: skip
    for node in prompt.values():
        inputs = node["inputs"]
        for name in FILE_INPUTS:
            if isinstance(inputs.get(name), str):
                inputs[name] = tiny_name(inputs[name])
        if "length" in inputs:
            inputs |= {"width": size_of(path), "height": size_of(path), "length": LENGTH}
        if node["class_type"] in ("KSampler", "WanFitSampler"):
            inputs |= {"steps": 2, "seed": 1}
    for key in texts:
        prompt[key] = {"class_type": "TestConditioning", "inputs": {"seed": 1}}
    if path.stem != WITH_TEXT:
        prompt = {key: node for key, node in prompt.items() if node["class_type"] != "WanFitTextEncoderLoader"}
    return prompt


def size_of(path: Path) -> int:
    return 32 if "5b" in path.stem else 64  # its VAE comes in one width only


def validate(prompt: dict[str, Any], object_info: dict[str, Any], folder: Path) -> None:
    """`comfy workflow validate`."""
    for name, data in (("prompt.json", prompt), ("object_info.json", object_info)):
        (folder / name).write_text(json.dumps(data), encoding="utf-8")
    ran = subprocess.run(
        [COMFY, "--skip-prompt", "--no-enable-telemetry", "workflow", "validate", "--workflow", folder / "prompt.json",
         "--input", folder / "object_info.json"],
        capture_output=True, text=True,
    )  # fmt: skip
    answer = json.loads(ran.stdout)
    assert answer["ok"] and answer["data"]["error_count"] == 0 and answer["data"]["warning_count"] == 0, answer


@pytest.fixture(scope="session")
def embedding(tiny_models: Path) -> Callable[[str], np.ndarray]:
    """Of a prompt by the headless host: transformers' UMT5 over the same file."""

    def embed(prompt: str) -> np.ndarray:
        checkpoint = open_checkpoint(tiny_models / "text_encoders" / TEXT)
        encoder = load_text_encoder(checkpoint, device="cpu", compute_dtype=torch.float32)
        return encode_prompts(encoder, load_tokenizer(checkpoint), [prompt]).numpy()

    return embed


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_runs_to_a_playable_video(
    server: Server, path: Path, request: pytest.FixtureRequest, tmp_path: Path, embedding: Callable[[str], np.ndarray]
) -> None:
    if "5b" in path.stem:
        request.getfixturevalue("large_vae")
    object_info = server.get("/object_info")
    prompt = tiny_prompt(path, object_info)
    validate(prompt, object_info, tmp_path)
    entry = server.run(prompt, timeout_s=300)
    saved = next(node for node, spec in prompt.items() if spec["class_type"] == "SaveVideo")
    files = next(iter(value for value in entry["outputs"][saved].values() if isinstance(value[0], dict)))
    video = server.base / "output" / files[0]["subfolder"] / files[0]["filename"]
    with av.open(str(video)) as container:
        frames = list(container.decode(video=0))
    assert len(frames) == LENGTH
    assert (frames[0].width, frames[0].height) == (size_of(path), size_of(path))
    if path.stem == WITH_TEXT:
        text = next(node["inputs"]["text"] for node in prompt.values() if node["class_type"] == "CLIPTextEncode")
        error = relative_error(np.load(server.base / "output" / "text.npy"), embedding(text))
        print(f"{server.tree.version}: GGUF text encoder against transformers, relative error {error:.1e}")
        assert error < 1e-4  # float32 in both


def test_all_nodes_exist(server: Server) -> None:
    known = set(server.get("/object_info")) | {"MarkdownNote"}
    for path in WORKFLOWS:
        assert {node["type"] for node in load(path)["nodes"]} <= known, path.stem
