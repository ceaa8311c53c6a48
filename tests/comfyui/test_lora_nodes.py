"""Core's LoRA loader on WanFit's MODEL: what cannot be honoured is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comfy_graphs import Graph, wanfit_model
from comfy_names import HIGH, LORA
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
