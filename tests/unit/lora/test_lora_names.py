"""Every dialect names the same tensors; what is not of a Wan transformer is not taken for one."""

import pytest
from wan_files import SIZES

from wanfit.checkpoint.structure import transformer_tensors
from wanfit.lora.names import part_of, spellings, tensor_of
from wanfit.tiny.lora import DIALECTS


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("variant", ["t2v-a14b", "ti2v-5b", "flf2v-14b"])
def test_every_tensor_of_every_model_is_found_under_its_stored_name(dialect, variant):
    spell, down, up = DIALECTS[dialect]
    for name in transformer_tensors(text_dim=4096, freq_dim=256, **SIZES[variant]):
        module = name.removesuffix(".weight").removesuffix(".bias")
        for suffix, role in ((down, "down"), (up, "up"), (".alpha", "alpha"), (".diff", "diff"), (".diff_b", "diff_b")):
            part = part_of(spell(module) + suffix)
            assert (part.module, part.role) == (module, role), name
        if name.endswith(".bias"):
            assert tensor_of(module, "diff_b") == name
        else:
            assert tensor_of(module, "diff") == name


def test_no_spelling_is_of_two_modules():
    fixed, block = spellings()
    assert len(set(fixed.values())) == 13 and len(set(block.values())) == 19


@pytest.mark.parametrize(
    ("name", "module", "role"),
    [
        ("diffusion_model.blocks.3.diff_m", "blocks.3.modulation", "diff_m"),
        ("diffusion_model.head.diff_m", "head.modulation", "diff_m"),
        ("diffusion_model.blocks.3.modulation.diff", "blocks.3.modulation", "diff"),
        ("diffusion_model.blocks.3.norm3.w_norm", "blocks.3.norm3", "diff"),
        ("diffusion_model.blocks.3.norm3.b_norm", "blocks.3.norm3", "diff_b"),
        ("transformer.blocks.3.attn1.to_q.lora_B.bias", "blocks.3.self_attn.q", "bias"),
        ("transformer.blocks.3.attn1.to_q.lora.down.weight", "blocks.3.self_attn.q", "down"),
        ("blocks.3.self_attn.q.lora_A", "blocks.3.self_attn.q", "down"),
        ("diffusion_model.blocks.0.ffn.0.dora_scale", "blocks.0.ffn.0", "DoRA"),
        ("base_model.model.blocks.0.ffn.0.lora_magnitude_vector.default.weight", "blocks.0.ffn.0", "DoRA"),
        ("lora_unet_blocks_0_ffn_0.lokr_w2_a", "blocks.0.ffn.0", "LoKr"),
        ("lycoris_blocks_0_ffn_0.hada_w1_b", "blocks.0.ffn.0", "LoHa"),
        ("diffusion_model.blocks.01.ffn.0.alpha", None, "alpha"),
        ("lora_unet_double_blocks_0_img_attn_qkv.lora_down.weight", None, "down"),
        ("lora_te1_text_model_encoder_layers_0_mlp_fc1.alpha", None, "alpha"),
    ],
)
def test_odd_names(name, module, role):
    part = part_of(name)
    assert (part.module, part.role) == (module, role)


@pytest.mark.parametrize("name", ["blocks.0.ffn.0.weight", "blocks.0.modulation", "head.head.bias", "x.alphabet"])
def test_names_of_a_model_are_not_of_a_lora(name):
    assert part_of(name) is None
