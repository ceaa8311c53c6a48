"""Identity of every variant at full size (headers over holes: no weights), experts by name, pairs and parts."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest
from wan_files import SIZES, header_of, write_header

from wanfit.checkpoint import TITLES, VARIANTS, check_pair, check_parts, open_checkpoint
from wanfit.checkpoint.expert import expert_in
from wanfit.checkpoint.structure import transformer_tensors, umt5_tensors, vae_tensors
from wanfit.errors import InputError
from wanfit.tiny import layouts
from wanfit.tiny.gguf_layout import write_gguf
from wanfit.tiny.models import tiny_transformer, tiny_vae

sparse = pytest.mark.skipif(sys.platform == "win32", reason="a hole in a file takes its full size on Windows")

NAMES = {
    "t2v-a14b": "wan2.2_t2v_high_noise_14B_fp16.safetensors",
    "i2v-a14b": "wan2.2_i2v_low_noise_14B_fp16.safetensors",
    "ti2v-5b": "wan2.2_ti2v_5B_fp16.safetensors",
    "t2v-14b": "wan2.1_t2v_14B_fp16.safetensors",
    "t2v-1.3b": "wan2.1_t2v_1.3B_fp16.safetensors",
    "i2v-14b": "wan2.1_i2v_480p_14B_fp16.safetensors",
    "flf2v-14b": "wan2.1_flf2v_720p_14B_fp16.safetensors",
}
PARAMETERS = {
    "t2v-a14b": 14_288_491_584,
    "i2v-a14b": 14_288_901_184,
    "ti2v-5b": 4_999_787_712,
    "t2v-14b": 14_288_491_584,
    "t2v-1.3b": 1_418_996_800,
    "i2v-14b": 16_394_878_784,
    "flf2v-14b": 16_395_536_704,
}


def full_transformer(variant: str):
    return transformer_tensors(**SIZES[variant.replace("t2v-14b", "t2v-a14b")], text_dim=4096, freq_dim=256)


def identity_of(path: Path, tensors):
    with open_checkpoint(write_header(path, header_of(tensors))) as checkpoint:
        return checkpoint.identity


def transformer_identity(tmp_path: Path, variant: str, name: str = ""):
    shapes = full_transformer(variant)
    return identity_of(tmp_path / (name or NAMES[variant]), {n: ("F16", s) for n, s in shapes.items()})


def vae_identity(tmp_path: Path, variant: str):
    base, decoder, latent, pixel = {"vae-2.1": (96, 96, 16, 3), "vae-2.2": (160, 256, 48, 12)}[variant]
    shapes = vae_tensors(variant, base_dim=base, decoder_base_dim=decoder, latent_channels=latent, pixel_channels=pixel)
    return identity_of(tmp_path / f"{variant}.safetensors", {n: ("F16", s) for n, s in shapes.items()})


def umt5_identity(tmp_path: Path, dim: int = 4096):
    shapes = umt5_tensors(vocab=256384, dim=dim, inner_dim=4096, ffn_dim=10240, num_heads=64, num_layers=24, buckets=32)
    return identity_of(tmp_path / "umt5_xxl_fp16.safetensors", {n: ("F16", s) for n, s in shapes.items()})


@sparse
@pytest.mark.parametrize("variant", NAMES)
def test_every_variant_at_full_size(tmp_path, variant):
    identity = transformer_identity(tmp_path, variant)
    size = SIZES[variant.replace("t2v-14b", "t2v-a14b")]
    assert (identity.kind, identity.variant, identity.version_certain) == ("transformer", variant, True)
    assert identity.parameters == PARAMETERS[variant]
    assert identity.nbytes == 2 * PARAMETERS[variant]
    for field in ("dim", "ffn_dim", "num_layers", "in_channels", "out_channels"):
        assert getattr(identity, field) == size[field]
    assert identity.num_heads == size["dim"] // 128
    assert identity.image_dim == size.get("image_dim", 0)
    assert identity.text_dim == 4096
    assert identity.formats == {"f16": len(full_transformer(variant))}
    expert = {"t2v-a14b": "high", "i2v-a14b": "low"}.get(variant, "single")
    assert (identity.expert, identity.expert_source) == (expert, "file name" if expert != "single" else "")
    text = identity.describe()
    assert TITLES[variant] in text and "\n" not in text and "GiB" in text
    assert json.loads(json.dumps(identity.to_json()))["variant"] == variant


@sparse
def test_the_comfy_fp8_file_has_its_published_size(tmp_path):
    tensors = {"scaled_fp8": ("F8_E4M3", (0,))}
    for name, shape in full_transformer("t2v-a14b").items():
        linear = len(shape) == 2 and name.endswith(".weight")
        tensors[name] = ("F8_E4M3" if linear else "F16", shape)
        if linear:
            tensors[name.removesuffix("weight") + "scale_weight"] = ("F32", ())
            tensors[name.removesuffix("weight") + "scale_input"] = ("F32", ())
    identity = identity_of(tmp_path / "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors", tensors)
    assert (tmp_path / "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors").stat().st_size == 14_293_923_632
    assert identity.expert == "low"
    assert identity.formats == {"f16": 689, "f8_e4m3": 406}
    assert identity.parameters == PARAMETERS["t2v-a14b"]


@sparse
def test_text_encoder_and_vaes(tmp_path):
    text = umt5_identity(tmp_path)
    assert (text.kind, text.variant, text.dim, text.num_heads) == ("text_encoder", "umt5-xxl", 4096, 64)
    assert (text.num_layers, text.ffn_dim, text.parameters) == (24, 10240, 5_680_910_336)
    for variant, latent, parameters in (("vae-2.1", 16, 126_892_531), ("vae-2.2", 48, 704_688_668)):
        vae = vae_identity(tmp_path, variant)
        assert (vae.kind, vae.variant, vae.out_channels) == ("vae", variant, latent)
        assert vae.parameters == parameters


@sparse
def test_old_and_new_t2v_are_told_apart_by_name_only(tmp_path):
    unknown = transformer_identity(tmp_path, "t2v-a14b", "model.safetensors")
    assert (unknown.variant, unknown.version_certain, unknown.expert) == ("t2v-a14b", False, "unknown")
    assert "Wan 2.1" in unknown.describe()
    old = transformer_identity(tmp_path, "t2v-a14b", "Wan2_1-T2V-14B.safetensors")
    assert (old.variant, old.version_certain, old.expert) == ("t2v-14b", True, "single")
    new = transformer_identity(tmp_path, "t2v-a14b", "t2v_low_noise.safetensors")
    assert (new.variant, new.version_certain, new.expert) == ("t2v-a14b", True, "low")


@pytest.mark.parametrize("variant", ["t2v-a14b", "i2v-a14b", "ti2v-5b", "i2v-14b", "flf2v-14b"])
def test_tiny_models_keep_their_variant(tmp_path, variant):
    path = layouts.write_plain(tmp_path / "wan2.2.safetensors", tiny_transformer(variant))
    identity = open_checkpoint(path).identity
    assert (identity.variant, identity.dim, identity.num_heads) == (variant, 256, 2)


@pytest.mark.parametrize(
    ("name", "expert"),
    [
        ("wan2.2_t2v_high_noise_14B_fp8_scaled", "high"),
        ("wan2.2_i2v_low_noise_14B_fp16", "low"),
        ("Wan2_2-T2V-A14B_HIGH_fp8_e4m3fn_scaled_KJ", "high"),
        ("Wan2_2-T2V-A14B-LOW_fp8_e4m3fn_scaled_KJ", "low"),
        ("Wan2.2-T2V-A14B-HighNoise-Q4_K_M", "high"),
        ("Wan2.2-I2V-A14B-LowNoise-Q8_0", "low"),
        ("HIGHNOISE", "high"),
        ("low_noise_model", "low"),
        ("wan2.2_i2v_A14b_high_noise_lightx2v_4step", "high"),
        ("wan2.2_high_noise_low_vram", "high"),
        ("wan_low_vram_high", "high"),
        ("wan2.2_highres_i2v", ""),
        ("wan_high_quality", ""),
        ("wan2.2_i2v_720p_lowvram", ""),
        ("slow_motion_highway", ""),
        ("flow_match", ""),
        ("merged_high_low", ""),
        ("high_noise_and_low_noise", ""),
        ("transformer", ""),
        ("", ""),
    ],
)
def test_experts_in_names(name, expert):
    assert expert_in(name) == expert


@pytest.mark.parametrize(
    ("path", "expert", "source"),
    [
        ("wan2.2_i2v_high_noise.safetensors", "high", "file name"),
        ("HighNoise/model.safetensors", "high", "folder"),
        ("LowNoise/wan_high_noise.safetensors", "high", "file name"),
        ("low_noise_model/diffusion_pytorch_model.safetensors", "low", "folder"),
        ("transformer_2/diffusion_pytorch_model.safetensors", "low", "folder"),
        ("transformer/diffusion_pytorch_model.safetensors", "unknown", ""),
        ("highres/model.safetensors", "unknown", ""),
    ],
)
def test_where_the_expert_comes_from(tmp_path, path, expert, source):
    file = layouts.write_plain(tmp_path / "x" / path, tiny_transformer())
    identity = open_checkpoint(file).identity
    assert (identity.expert, identity.expert_source) == (expert, source)


def test_expert_from_metadata(tmp_path):
    weights = tiny_transformer()
    path = layouts.write_plain(
        tmp_path / "a.safetensors", weights, metadata={"modelspec.title": "Wan 2.2 I2V low noise"}
    )
    assert open_checkpoint(path).identity.expert_source == "metadata"
    path = write_gguf(tmp_path / "a.gguf", weights, "Q8_0", name="Wan2.2 I2V A14B HighNoise")
    identity = open_checkpoint(path).identity
    assert (identity.expert, identity.expert_source) == ("high", "metadata")


def experts(tmp_path: Path, *pairs: tuple[str, str]):
    for index, (variant, name) in enumerate(pairs):
        weights = tiny_transformer(variant)
        path = layouts.write_plain(tmp_path / str(index) / f"wan2.2_{name}.safetensors", weights)
        yield open_checkpoint(path).identity


GOOD = (("i2v-a14b", "high_noise"), ("i2v-a14b", "low_noise"))


def test_good_pairs(tmp_path):
    high, low = experts(tmp_path, *GOOD)
    check_pair(high, low)
    unknown = dataclasses.replace(high, expert="unknown", expert_source="")
    check_pair(unknown, unknown)
    check_pair(high, dataclasses.replace(low, formats={"q4_k": 1}, nbytes=5))


@pytest.mark.parametrize(
    ("high", "low", "says"),
    [
        (GOOD[0], GOOD[0], ["transformer_2", "high-noise", "low-noise file of Wan 2.2 I2V-A14B"]),
        (GOOD[1], GOOD[1], ["transformer is the low-noise", "high-noise file"]),
        (GOOD[1], GOOD[0], ["Swap"]),
        (("t2v-a14b", "high_noise"), GOOD[1], ["16 channels", "36 channels", "T2V-A14B", "I2V-A14B"]),
        (GOOD[0], ("ti2v-5b", "x"), ["Wan 2.2 TI2V-5B", "one model"]),
        (("i2v-14b", "x"), GOOD[1], ["Wan 2.1 I2V-14B", "one model"]),
    ],
)
def test_bad_pairs(tmp_path, high, low, says):
    first, second = experts(tmp_path, high, low)
    with pytest.raises(InputError) as caught:
        check_pair(first, second)
    assert caught.value.code == "pair_mismatch"
    for text in says:
        assert text in str(caught.value)


def test_pairs_of_other_sizes_and_kinds(tmp_path):
    high, low = experts(tmp_path, *GOOD)
    with pytest.raises(InputError, match="40 blocks of width 5120"):
        check_pair(dataclasses.replace(high, dim=5120, num_layers=40), low)
    vae = open_checkpoint(layouts.write_plain(tmp_path / "v.safetensors", tiny_vae())).identity
    with pytest.raises(InputError, match=r"transformer_2 is a Wan 2\.1 VAE"):
        check_pair(high, vae)


@sparse
def test_parts(tmp_path):
    vaes = {name: vae_identity(tmp_path, name) for name in ("vae-2.1", "vae-2.2")}
    text = umt5_identity(tmp_path)
    a14b, small = (transformer_identity(tmp_path, name) for name in ("i2v-a14b", "ti2v-5b"))
    check_parts(a14b, vaes["vae-2.1"], text)
    check_parts(small, vaes["vae-2.2"], text)
    check_parts(a14b)
    with pytest.raises(InputError, match=r"48 latent channels.*works with 16.*wan_2\.1_vae\.safetensors"):
        check_parts(a14b, vaes["vae-2.2"], text)
    with pytest.raises(InputError, match=r"16 latent channels.*works with 48.*wan2\.2_vae\.safetensors"):
        check_parts(small, vaes["vae-2.1"])
    with pytest.raises(InputError, match=r"2048.*4096.*umt5_xxl"):
        check_parts(a14b, None, umt5_identity(tmp_path, dim=2048))
    with pytest.raises(InputError, match=r"text_encoder is a Wan 2\.1 VAE"):
        check_parts(a14b, None, vaes["vae-2.1"])
    with pytest.raises(InputError, match="vae is a UMT5"):
        check_parts(a14b, text)
    with pytest.raises(InputError, match=r"transformer is a Wan 2\.1 VAE"):
        check_parts(vaes["vae-2.1"])


def test_defaults_of_the_variants():
    assert set(TITLES) == set(VARIANTS) | {"vae-2.1", "vae-2.2", "umt5-xxl"}
    t2v, i2v, small = (VARIANTS[name] for name in ("t2v-a14b", "i2v-a14b", "ti2v-5b"))
    assert (t2v.steps, t2v.shift, t2v.boundary_ratio, t2v.guidance_scale, t2v.guidance_scale_2) == (40, 12, 0.875, 4, 3)
    assert (i2v.steps, i2v.shift, i2v.boundary_ratio, i2v.guidance_scale, i2v.guidance_scale_2) == (
        40,
        5,
        0.9,
        3.5,
        3.5,
    )
    assert (small.steps, small.num_frames, small.fps, small.size_multiple) == (50, 121, 24, 32)
    for variant in VARIANTS.values():
        assert variant.num_frames % 4 == 1
        assert variant.has_experts == (variant.guidance_scale_2 is not None)
        assert all(side % variant.size_multiple == 0 for size in variant.sizes for side in size)
