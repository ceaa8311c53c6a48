"""The name maps are bijections onto diffusers' own full-size models, with the shapes that `structure` states."""

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel
from wan_files import SIZES

from wanfit.checkpoint.names import conventions, to_diffusers_transformer, to_diffusers_vae
from wanfit.checkpoint.structure import transformer_tensors, umt5_tensors, vae_tensors

TENSORS = {"t2v-a14b": 1095, "i2v-a14b": 1095, "ti2v-5b": 825, "t2v-1.3b": 825, "i2v-14b": 1303, "flf2v-14b": 1304}
VAES = {
    "vae-2.1": ({}, (96, 96, 16, 3), 194),
    "vae-2.2": (
        {"base_dim": 160, "decoder_base_dim": 256, "z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12,
             "patch_size": 2, "scale_factor_spatial": 16, "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48},
        (160, 256, 48, 12),
        196,
    ),
}  # fmt: skip


def shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}


@pytest.mark.parametrize("variant", SIZES)
def test_transformer_names_are_a_bijection(variant):
    size = SIZES[variant]
    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=size["dim"] // 128,
            ffn_dim=size["ffn_dim"],
            num_layers=size["num_layers"],
            in_channels=size["in_channels"],
            out_channels=size["out_channels"],
            image_dim=size.get("image_dim"),
            added_kv_proj_dim=size["dim"] if "image_dim" in size else None,
            pos_embed_seq_len=size.get("image_positions"),
        )
    canonical = transformer_tensors(**size, text_dim=4096, freq_dim=256)
    mapped = {to_diffusers_transformer(name): shape for name, shape in canonical.items()}
    assert len(mapped) == len(canonical) == TENSORS[variant]
    assert mapped == shapes_of(model)


@pytest.mark.parametrize("variant", VAES)
def test_vae_names_are_a_bijection(variant):
    config, (base, decoder, latent, pixel), count = VAES[variant]
    with torch.device("meta"):
        model = AutoencoderKLWan(**config)
    canonical = vae_tensors(
        variant, base_dim=base, decoder_base_dim=decoder, latent_channels=latent, pixel_channels=pixel
    )
    mapped = {to_diffusers_vae(name, variant): shape for name, shape in canonical.items()}
    assert len(mapped) == len(canonical) == count
    assert mapped == shapes_of(model)


def test_umt5_names_are_those_of_transformers():
    config = UMT5Config(
        vocab_size=256384, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu", is_encoder_decoder=False,
    )  # fmt: skip
    with torch.device("meta"):
        expected = shapes_of(UMT5EncoderModel(config))
    expected.pop("encoder.embed_tokens.weight", None)  # tied to shared.weight
    ours = umt5_tensors(vocab=256384, dim=4096, inner_dim=4096, ffn_dim=10240, num_heads=64, num_layers=24, buckets=32)
    assert ours == expected
    assert len(ours) == 242


def test_every_convention_leads_back_to_the_canonical_name():
    transformer = transformer_tensors(**SIZES["flf2v-14b"], text_dim=4096, freq_dim=256)
    original, diffusers = (c for c in conventions() if c.kind == "transformer")
    for name in transformer:
        assert original.canonical(name) == name
        assert diffusers.canonical(to_diffusers_transformer(name)) == name
    for variant in VAES:
        vae = vae_tensors(variant, base_dim=8, decoder_base_dim=8, latent_channels=16, pixel_channels=3)
        original, diffusers = (c for c in conventions() if c.variant == variant)
        for name in vae:
            assert original.canonical(name) == name
            assert diffusers.canonical(to_diffusers_vae(name, variant)) == name


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("token_embedding.weight", "shared.weight"),
        ("blocks.23.attn.q.weight", "encoder.block.23.layer.0.SelfAttention.q.weight"),
        ("blocks.3.pos_embedding.embedding.weight", "encoder.block.3.layer.0.SelfAttention.relative_attention_bias.weight"),
        ("blocks.3.norm2.weight", "encoder.block.3.layer.1.layer_norm.weight"),
        ("blocks.3.ffn.gate.0.weight", "encoder.block.3.layer.1.DenseReluDense.wi_0.weight"),
        ("blocks.3.ffn.fc1.weight", "encoder.block.3.layer.1.DenseReluDense.wi_1.weight"),
        ("norm.weight", "encoder.final_layer_norm.weight"),
        ("enc.blk.7.ffn_down.weight", "encoder.block.7.layer.1.DenseReluDense.wo.weight"),
        ("enc.blk.7.ffn_up.weight", "encoder.block.7.layer.1.DenseReluDense.wi_1.weight"),
        ("enc.blk.7.attn_norm.weight", "encoder.block.7.layer.0.layer_norm.weight"),
        ("enc.output_norm.weight", "encoder.final_layer_norm.weight"),
    ],
)  # fmt: skip
def test_umt5_names_of_other_origins(stored, canonical):
    found = {c.canonical(stored) for c in conventions() if c.kind == "text_encoder"} - {None}
    assert found == {canonical}


@pytest.mark.parametrize(
    "name", ["blocks.0.self_attn.q", "blocks.00.norm3.weight", "xblocks.0.norm3.weight", "blocks.0.norm3.weight.x",
             "blocks.0.norm2.weight", "patch_embedding", "head.head.gamma", ""],
)  # fmt: skip
def test_names_match_as_a_whole_or_not_at_all(name):
    original = next(c for c in conventions() if c.kind == "transformer" and c.title == "original")
    assert original.canonical(name) is None


@pytest.mark.parametrize("name", ["encoder.block.0.norm3.weight", "blocks.0.norm2.weight", "decoder.conv1.weight"])
def test_foreign_names_have_no_diffusers_name(name):
    with pytest.raises(KeyError):
        to_diffusers_transformer(name)


def test_vae_names_of_the_other_version_are_refused():
    with pytest.raises(KeyError):
        to_diffusers_vae("decoder.upsamples.0.upsamples.0.residual.2.weight", "vae-2.1")
    with pytest.raises(KeyError):
        to_diffusers_vae("decoder.upsamples.0.residual.2.weight", "vae-2.2")
