"""A LoRA that PEFT trains and saves, on a tiny Wan transformer: our forward against PEFT's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig, get_peft_model
from safetensors import safe_open
from tiny_run import relative_error

from wanfit.blocks import ForwardSettings
from wanfit.checkpoint import open_checkpoint, to_diffusers_transformer
from wanfit.offload import Ladder, MappedBlocks
from wanfit.pipeline.loras import LoraChoice, load_loras
from wanfit.pipeline.transformer import build_transformer
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.models import tiny_transformer

CPU = torch.device("cpu")
TARGETS = {
    "attention": ["to_q", "to_k", "to_v", "to_out.0"],
    "all linears": "all-linear",
    "rank by layer": ["to_q", "net.2"],
}
BOUND = 1e-4
"""Required. Measured 1e-6: float32, another order of the same sums."""


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("peft") / "wan2.2_t2v_high_noise.safetensors"
    return write_plain(path, tiny_transformer("t2v-a14b", seed=1), dtype=torch.float32)


def reference_model(path: Path) -> WanTransformer3DModel:
    """diffusers' own, with the file's weights."""
    with open_checkpoint(path) as checkpoint:
        of = checkpoint.identity
        model = WanTransformer3DModel(
            num_attention_heads=of.num_heads, attention_head_dim=of.dim // of.num_heads, in_channels=of.in_channels,
            out_channels=of.out_channels, text_dim=of.text_dim, freq_dim=256, ffn_dim=of.ffn_dim,
            num_layers=of.num_layers,
        )  # fmt: skip
        state = {to_diffusers_transformer(name): checkpoint.load(name).data.clone() for name in checkpoint.tensors}
    model.load_state_dict(state)
    return model.eval().requires_grad_(False)


@pytest.mark.parametrize("targets", TARGETS)
def test_equals_pefts_own_forward(model_file: Path, tmp_path: Path, targets: str) -> None:
    torch.manual_seed(0)
    config = LoraConfig(
        r=4, lora_alpha=4, target_modules=TARGETS[targets], init_lora_weights=False,
        rank_pattern={"net.2": 7} if targets == "rank by layer" else {},
        alpha_pattern={"net.2": 7} if targets == "rank by layer" else {},
    )  # fmt: skip
    reference = reference_model(model_file)
    text_dim = reference.config.text_dim
    given = {
        "hidden_states": torch.randn(1, 16, 2, 8, 6),
        "timestep": torch.tensor([700]),
        "encoder_hidden_states": torch.randn(1, 512, text_dim),
    }
    with torch.inference_mode():
        plain = reference(**given, return_dict=False)[0].clone()
    trained = get_peft_model(reference, config)
    trained.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    with safe_open(file, framework="pt") as saved:
        assert all(name.startswith("base_model.model.") for name in saved.keys())  # noqa: SIM118
        pairs = len(saved.keys()) // 2
    with torch.inference_mode():
        expected = trained(**given, return_dict=False)[0]

    (patches,) = load_loras([LoraChoice(file)], [("", model_file)]).patches
    matched = sum(len(block.low_rank) for block in patches.blocks.values())
    matched += sum(len(patch.low_rank) for patch in patches.rest.values())
    assert matched == pairs
    with open_checkpoint(model_file) as checkpoint, torch.inference_mode():
        source = MappedBlocks(checkpoint, CPU)
        ours = build_transformer(checkpoint, source, Ladder(ForwardSettings(chunk_tokens=7)), torch.float32)
        ours.patches = patches
        ours.load_rest(checkpoint, CPU, torch.float32)
        actual = ours(**given, return_dict=False)[0]
    error = relative_error(actual, expected)
    print(f"{targets}: {pairs} pairs, relative error {error:.1e}, effect {relative_error(plain, expected):.2f}")
    assert relative_error(plain, expected) > 0.01
    assert error <= BOUND
