"""Core's LoRA loader on WanFit's MODEL: what cannot be honoured is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfy_graphs import Graph, wanfit_model
from comfy_names import HIGH, LORA, LOW
from comfyui_server import PromptFailed, Server

from wanfit.checkpoint import open_checkpoint
from wanfit.tiny.lora import write_lora

LAYER = "diffusion_model.blocks.0.self_attn.q"


def pair(rows: int, columns: int, layer: str = LAYER) -> dict[str, torch.Tensor]:
    return {f"{layer}.lora_down.weight": torch.ones(2, columns), f"{layer}.lora_up.weight": torch.ones(rows, 2)}


def said(server: Server, name: str, tensors: dict[str, torch.Tensor] | None, strength: float = 1.0) -> str:
    if tensors is not None:
        write_lora(server.base / "models" / "loras" / name, tensors)
    graph = Graph()
    model = graph.add("LoraLoaderModelOnly", model=wanfit_model(graph, HIGH), lora_name=name, strength_model=strength)
    graph.sample(model, "x", steps=1)
    with pytest.raises(PromptFailed) as caught:
        server.run(graph.prompt)
    return f"{caught.value} {caught.value.details}"


@pytest.fixture(scope="module")
def width(server: Server) -> int:
    with open_checkpoint(server.base / "models" / "diffusion_models" / HIGH) as checkpoint:
        return checkpoint.identity.dim


def test_kinds_that_are_refused(server: Server, width: int) -> None:
    ones = torch.ones
    cases: dict[str, tuple[dict[str, Any], str]] = {
        "dora": (pair(width, width) | {f"{LAYER}.dora_scale": ones(width, 1)}, "DoRA"),
        "lokr": ({f"{LAYER}.lokr_w1": ones(2, 2), f"{LAYER}.lokr_w2": ones(width // 2, width // 2)}, "lokr"),
        "loha": (
            {f"{LAYER}.hada_w{n}_{side}": ones(*shape) for n in (1, 2) for side, shape in
             (("a", (width, 2)), ("b", (2, width)))},
            "loha",
        ),
        "oft": ({f"{LAYER}.oft_blocks": ones(4, width // 4, width // 4)}, "oft"),
    }  # fmt: skip
    for name, (tensors, part) in cases.items():
        text = said(server, f"{name}.safetensors", tensors)
        assert "patch_unsupported" in text and part.lower() in text.lower(), (name, text[:600])
        assert "self_attn.q" in text


def test_loras_for_other_models(server: Server, width: int) -> None:
    text = said(server, "wide.safetensors", pair(2 * width, 2 * width))
    assert str(2 * width) in text and str(width) in text and "another model" in text
    text = said(server, "sdxl.safetensors", pair(8, 8, "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"))
    assert "lora_mismatch" in text and HIGH in text


def test_a_strength_that_is_no_number(server: Server) -> None:
    text = said(server, LORA, None, float("nan"))
    assert "nan" in text.lower() and "strength" in text


def test_a_lora_of_the_other_expert_is_pointed_out(server: Server, width: int, run: Any) -> None:
    """From its name, or its metadata; through the policy node, which hands both experts on."""
    folder = server.base / "models" / "loras"
    named, titled = "tiny_high_noise_lora.safetensors", "tiny_titled.safetensors"
    write_lora(folder / named, pair(width, width))
    write_lora(folder / titled, pair(width, width), {"modelspec.title": "tiny low noise"})
    graph = Graph()
    high = wanfit_model(graph, HIGH, LOW)
    models = {"model_high": high, "model_low": [high[0], 1]}

    def put(expert: str, name: str) -> None:
        models[expert] = graph.add("LoraLoaderModelOnly", model=models[expert], lora_name=name, strength_model=0.1)

    put("model_low", named)
    put("model_high", named)
    policy = graph.add(
        "WanFitOffloadPolicy", model=models["model_high"], model_low=models["model_low"], policy="stream",
        vram_budget=0.0, ram_budget=0.0, attention="comfyui", fp8_matmul=True,
    )  # fmt: skip
    models = {"model_high": policy, "model_low": [policy[0], 1]}
    put("model_high", titled)
    put("model_low", titled)
    text = graph.add("TestConditioning", seed=1)
    node = graph.add(
        "WanFitSampler", **models, positive=text, negative=text, seed=1, steps=2, cfg_high=1.0, cfg_low=1.0,
        latent_image=graph.add("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1),
        sampler_name="euler", scheduler="simple", shift=5.0, boundary=0.0, switch_step=0, start_at_step=0,
        end_at_step=10000, add_noise="enable", return_with_leftover_noise="disable", save_every=0, resume="off",
    )  # fmt: skip
    graph.add("TestSaveTensor", latent=node, name="pointed_out")
    notes = [line for line in run(graph).entry["outputs"][node[0]]["text"][0].splitlines() if "LoRA" in line]
    assert notes == [
        f"note: {titled} is a LoRA of the low-noise expert, as its metadata says, and is on model_high",
        f"note: {named} is a LoRA of the high-noise expert, as its file name says, and is on model_low",
    ]
