"""What a LoRA file says, what of it fits a model, and every reason to refuse one."""

import json

import pytest
import torch
from safetensors.torch import save_file
from wan_files import SIZES

from wanfit.checkpoint.structure import transformer_tensors
from wanfit.errors import CheckpointError, InputError
from wanfit.lora import match, open_lora
from wanfit.tiny.lora import DIALECTS, KINDS, lora_tensors, write_lora
from wanfit.tiny.models import tiny_transformer

MODEL = "Wan 2.2 I2V-A14B"
PAIR = "diffusion_model.blocks.0.self_attn.q"


@pytest.fixture(scope="module")
def weights():
    return tiny_transformer(num_layers=1)


def shapes_of(tensors):
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def real_shapes(variant):
    return transformer_tensors(text_dim=4096, freq_dim=256, **SIZES[variant])


def pair(rows=256, columns=256, rank=2, stem=PAIR):
    return {
        f"{stem}.lora_down.weight": torch.ones(rank, columns),
        f"{stem}.lora_up.weight": torch.ones(rows, rank),
    }


@pytest.mark.parametrize("dialect", DIALECTS)
def test_every_dialect_changes_the_same_tensors(weights, tmp_path, dialect):
    found = []
    for name in ("diffusion_model", dialect):
        path = write_lora(tmp_path / f"{name}.safetensors", lora_tensors(weights, dialect=name, kinds=KINDS))
        result = match(open_lora(path), shapes_of(weights), MODEL)
        assert result.notices == () and result.count == len(weights)
        found.append(
            {n: (p.scale, p.up.view().flatten(1) @ p.down.view().flatten(1)) for n, p in result.low_rank.items()}
            | {n: (d.scale, d.raw.view()) for n, d in result.differences.items()}
        )
    assert found[0].keys() == found[1].keys() == weights.keys()
    for name, (scale, values) in found[0].items():
        assert scale == found[1][name][0] and torch.equal(values, found[1][name][1])


@pytest.mark.parametrize(
    "alpha_dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8]
)
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_alpha_of_any_dtype_and_rank_per_layer(tmp_path, alpha_dtype, shape):
    tensors = pair(rank=8) | pair(rank=2, stem="diffusion_model.blocks.0.ffn.0")
    tensors[f"{PAIR}.alpha"] = torch.full(shape, 4).to(alpha_dtype)
    lora = open_lora(write_lora(tmp_path / "a.safetensors", tensors))
    assert lora.low_rank["blocks.0.self_attn.q.weight"].scale == 0.5
    assert lora.low_rank["blocks.0.ffn.0.weight"].scale == 1.0
    assert lora.ranks == [2, 8]


def test_a_peft_bias_takes_the_scale_of_its_lora(tmp_path):
    stem = "base_model.model.blocks.0.self_attn.q"
    tensors = {
        f"{stem}.lora_A.default.weight": torch.ones(4, 256),
        f"{stem}.lora_B.default.weight": torch.ones(256, 4),
        f"{stem}.lora_B.default.bias": torch.ones(256),
        f"{stem}.alpha": torch.tensor(2.0),
    }
    lora = open_lora(write_lora(tmp_path / "a.safetensors", tensors))
    assert lora.differences["blocks.0.self_attn.q.bias"].scale == 0.5


@pytest.mark.parametrize(
    ("name", "expert", "source"),
    [
        ("wan2.2_i2v_A14b_high_noise_lora_rank64_lightx2v_4step_1022", "high", "file name"),
        ("wan2.2_t2v_lightx2v_4steps_lora_v1.1_low_noise", "low", "file name"),
        ("Wan_2_2_I2V_A14B_HIGH_lightx2v_4step_lora_v1030_rank_64_bf16", "high", "file name"),
        ("lightx2v_T2V_14B_cfg_step_distill_v2_lora_rank64_bf16", "unknown", ""),
    ],
)
def test_the_expert_is_read_from_the_published_names(tmp_path, name, expert, source):
    lora = open_lora(write_lora(tmp_path / f"{name}.safetensors", pair()))
    assert (lora.expert, lora.expert_source) == (expert, source)


def test_a_scale_in_the_metadata_is_told(tmp_path):
    metadata = {"lora_adapter_metadata": json.dumps({"transformer.lora_alpha": 64, "transformer.r": 32})}
    lora = open_lora(write_lora(tmp_path / "a.safetensors", pair(), metadata))
    assert "lora_alpha 64 at rank 32" in lora.notices[0] and "2" in lora.notices[0]
    assert open_lora(write_lora(tmp_path / "b.safetensors", pair(), {"lora_adapter_metadata": "{}"})).notices == ()


def test_image_layers_of_wan_21_are_listed_and_the_rest_is_applied(tmp_path):
    tensors = pair(5120, 5120)
    for index in range(3):
        tensors |= pair(5120, 5120, stem=f"diffusion_model.blocks.{index}.cross_attn.k_img")
    tensors["diffusion_model.vace_blocks.0.x.diff"] = torch.ones(1)
    found = match(open_lora(write_lora(tmp_path / "a.safetensors", tensors)), real_shapes("i2v-a14b"), MODEL)
    assert list(found.low_rank) == ["blocks.0.self_attn.q.weight"]
    assert "3 of 4 tensors are not in Wan 2.2 I2V-A14B: blocks.*.cross_attn.k_img.weight (3)" in found.notices[0]
    assert "vace_blocks.*.x.diff" in found.notices[1]


def test_an_embedding_of_t2v_is_left_out_of_i2v_and_told(tmp_path):
    tensors = pair(5120, 5120) | {"diffusion_model.patch_embedding.diff": torch.ones(5120, 16, 1, 2, 2)}
    found = match(open_lora(write_lora(tmp_path / "a.safetensors", tensors)), real_shapes("i2v-a14b"), MODEL)
    assert not found.differences and found.low_rank
    assert "5120x16x1x2x2" in found.notices[0] and "5120x36x1x2x2" in found.notices[0]


@pytest.mark.parametrize(
    ("tensors", "parts"),
    [
        (pair(3072, 3072, 64), ["3072x3072", "5120x5120", "TI2V-5B"]),
        (pair(1536, 1536), ["1536x1536", "5120x5120", "T2V-1.3B"]),
        (pair(5120, 5120, stem="diffusion_model.blocks.0.ffn.0"), ["5120x5120", "13824x5120"]),
        ({"diffusion_model.blocks.0.self_attn.q.diff_b": torch.ones(3072)}, ["3072", "5120", "TI2V-5B"]),
        ({"diffusion_model.patch_embedding.diff": torch.ones(5120, 16, 1, 2, 2)}, ["5120x16x1x2x2"]),
        (pair(stem="lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q"), ["Stable Diffusion"]),
        (pair(stem="lora_unet_double_blocks_0_img_attn_qkv"), ["Flux"]),
        (pair(stem="transformer.single_transformer_blocks.0.attn.to_q"), ["Flux"]),
        (pair(stem="transformer_blocks.0.attn.add_q_proj"), ["Qwen-Image"]),
        (pair(stem="diffusion_model.transformer_blocks.0.attn1.to_q"), ["another diffusion transformer"]),
        (pair(stem="lora_te_text_model_encoder_layers_0_mlp_fc1"), ["a text encoder"]),
        (pair(stem="diffusion_model.layers.0.attention.qkv"), ["layers.0.attention.qkv"]),
        (pair(5120, 5120, stem="diffusion_model.blocks.0.cross_attn.k_img"), ["blocks.*.cross_attn.k_img"]),
    ],
)
def test_loras_for_another_model_are_refused_with_what_they_seem_to_be(tmp_path, tensors, parts):
    lora = open_lora(write_lora(tmp_path / "a.safetensors", tensors))
    with pytest.raises(InputError) as caught:
        match(lora, real_shapes("i2v-a14b"), MODEL)
    assert caught.value.code == "lora_mismatch"
    for part in (*parts, MODEL, "a.safetensors"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("more", "code", "part"),
    [
        ({f"{PAIR}.dora_scale": torch.ones(256, 1)}, "lora_unsupported", "DoRA"),
        ({"lora_unet_blocks_0_ffn_0.lokr_w1": torch.ones(4, 4)}, "lora_unsupported", "LoKr"),
        ({"lora_unet_blocks_0_ffn_0.hada_w1_a": torch.ones(4, 4)}, "lora_unsupported", "LoHa"),
        ({f"{PAIR}.lora_mid.weight": torch.ones(2, 2)}, "lora_unsupported", "middle"),
        ({f"{PAIR}.oft_blocks": torch.ones(2, 2)}, "lora_unsupported", "OFT"),
        ({f"{PAIR}.diff": torch.ones(256, 256, dtype=torch.int8)}, "lora_unsupported", "int8"),
        ({f"{PAIR}.alpha": torch.tensor(float("nan"))}, "file_damaged", "alpha"),
        ({f"{PAIR}.alpha": torch.ones(3)}, "file_damaged", "[3]"),
        ({"blocks.0.self_attn.q.lora_A.weight": torch.ones(2, 256)}, "file_damaged", "both"),
        ({"blocks.0.ffn.0.lora_A.weight": torch.ones(2, 256)}, "file_damaged", "no up"),
        ({"blocks.0.ffn.0.lora_B.weight": torch.ones(256, 2)}, "file_damaged", "no down"),
        (
            {"blocks.0.ffn.0.lora_A.weight": torch.ones(2, 256), "blocks.0.ffn.0.lora_B.weight": torch.ones(256, 3)},
            "file_damaged",
            "multiplied",
        ),
        ({"blocks.0.ffn.0.lora_B.bias": torch.ones(256)}, "file_damaged", "lora_B.bias"),
    ],
)
def test_kinds_that_are_not_applied_and_contradictions(tmp_path, more, code, part):
    path = write_lora(tmp_path / "a.safetensors", pair() | more)
    with pytest.raises((InputError, CheckpointError)) as caught:
        open_lora(path)
    assert caught.value.code == code and part in str(caught.value)


def test_a_model_and_broken_files_are_refused(weights, tmp_path):
    model = tmp_path / "model.safetensors"
    save_file(weights, model)
    with pytest.raises(CheckpointError, match=r"model_unknown.*not a LoRA"):
        open_lora(model)
    with pytest.raises(CheckpointError, match="file_missing"):
        open_lora(tmp_path / "no.safetensors")
    whole = write_lora(tmp_path / "a.safetensors", pair()).read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        (tmp_path / "cut.safetensors").write_bytes(whole[:cut])
        with pytest.raises(CheckpointError, match="file_damaged"):
            open_lora(tmp_path / "cut.safetensors")
    (tmp_path / "a.pt").write_bytes(whole)
    with pytest.raises(CheckpointError, match="file_unsupported"):
        open_lora(tmp_path / "a.pt")
