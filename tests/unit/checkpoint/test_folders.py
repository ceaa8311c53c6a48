"""Diffusers component folders, folders of shards with original names, whole pipelines."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from transformers import UMT5Config, UMT5EncoderModel

from wanfit.checkpoint import component_folders, open_checkpoint, to_diffusers_transformer, to_diffusers_vae
from wanfit.errors import CheckpointError
from wanfit.tiny import layouts
from wanfit.tiny.models import tiny_transformer, tiny_vae


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return tiny_transformer()


def refused(path: Path, code: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert caught.value.code == code
    return str(caught.value)


@pytest.mark.parametrize("shard_size", ["1GB", "2MB"])
def test_transformers_saved_by_diffusers(tmp_path, shard_size):
    model = WanTransformer3DModel(
        num_attention_heads=2, ffn_dim=512, num_layers=2, in_channels=36, text_dim=64, freq_dim=256
    )
    model.save_pretrained(tmp_path / "transformer_2", max_shard_size=shard_size)
    sharded = len(list((tmp_path / "transformer_2").glob("*.safetensors"))) > 1
    assert sharded == (shard_size == "2MB")
    with open_checkpoint(tmp_path / "transformer_2") as checkpoint:
        assert checkpoint.container == "folder"
        assert checkpoint.metadata["_class_name"] == "WanTransformer3DModel"
        assert (checkpoint.identity.variant, checkpoint.identity.expert) == ("i2v-a14b", "low")
        assert checkpoint.identity.expert_source == "folder"
        state = model.state_dict()
        assert {to_diffusers_transformer(name) for name in checkpoint.tensors} == state.keys()
        for name in checkpoint.tensors:
            assert torch.equal(checkpoint.load(name).data, state[to_diffusers_transformer(name)])


@pytest.mark.parametrize("variant", ["vae-2.1", "vae-2.2"])
def test_vaes_saved_by_diffusers(tmp_path, variant):
    extra = {"z_dim": 48, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2, "decoder_base_dim": 16,
                 "latents_mean": [0.0] * 48, "latents_std": [1.0] * 48}  # fmt: skip
    model = AutoencoderKLWan(base_dim=8, **(extra if variant == "vae-2.2" else {}))
    model.save_pretrained(tmp_path / "vae")
    checkpoint = open_checkpoint(tmp_path / "vae")
    assert checkpoint.identity.variant == variant
    state = model.state_dict()
    assert {to_diffusers_vae(name, variant) for name in checkpoint.tensors} == state.keys()
    assert all(torch.equal(checkpoint.load(n).data, state[to_diffusers_vae(n, variant)]) for n in checkpoint.tensors)


def test_text_encoders_saved_by_transformers(tmp_path):
    config = UMT5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4,
                        feed_forward_proj="gated-gelu", is_encoder_decoder=False)  # fmt: skip
    model = UMT5EncoderModel(config)
    model.save_pretrained(tmp_path / "text_encoder")
    checkpoint = open_checkpoint(tmp_path / "text_encoder")
    assert (checkpoint.identity.kind, checkpoint.identity.dim, checkpoint.identity.num_heads) == ("text_encoder", 32, 4)
    assert checkpoint.tensors.keys() == model.state_dict().keys() - {"encoder.embed_tokens.weight"}
    assert torch.equal(checkpoint.load("shared.weight").data, model.shared.weight)


def test_the_writers_of_tiny_folders(tmp_path, weights):
    config = {"_class_name": "WanTransformer3DModel"}
    folder = layouts.write_diffusers_folder(tmp_path / "transformer", weights, config, max_shard_size="2MB")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.metadata == config
    assert all(torch.equal(checkpoint.load(name).data, tensor) for name, tensor in weights.items())
    vae = layouts.write_diffusers_folder(tmp_path / "vae", tiny_vae(), {"_class_name": "AutoencoderKLWan"})
    assert open_checkpoint(vae).identity.variant == "vae-2.1"


@pytest.mark.parametrize("index", [True, False])
def test_original_shards(tmp_path, weights, index):
    folder = layouts.write_original_folder(tmp_path / "high_noise_model", weights, max_shard_size="3MB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    if not index:
        next(folder.glob("*.index.json")).unlink()
    checkpoint = open_checkpoint(folder)
    assert checkpoint.identity.expert == "high"
    assert all(torch.equal(checkpoint.load(name).data, tensor) for name, tensor in weights.items())


@pytest.fixture
def sharded(tmp_path, weights) -> Path:
    return layouts.write_original_folder(tmp_path / "low_noise_model", weights, max_shard_size="3MB")


@pytest.mark.parametrize("index", [True, False])
def test_missing_shards_are_named(sharded, index):
    if not index:
        next(sharded.glob("*.index.json")).unlink()
    shard = sorted(sharded.glob("*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refused(sharded, "file_missing")


def test_one_shard_given_as_a_file(sharded):
    shard = sorted(sharded.glob("*.safetensors"))[0]
    text = refused(shard, "tensors_missing")
    assert "shard 1 of" in text and str(sharded) in text


def test_the_index_given_as_a_file(sharded):
    assert str(sharded) in refused(next(sharded.glob("*.index.json")), "file_unsupported")


@pytest.mark.parametrize(
    "evil", ["../secret.safetensors", "/etc/passwd", "..", "C:\\x.safetensors", "a/b.safetensors", ""]
)
def test_an_index_names_files_of_its_own_folder_only(sharded, evil):
    index = next(sharded.glob("*.index.json"))
    content = json.loads(index.read_text())
    content["weight_map"]["head.modulation"] = evil
    index.write_text(json.dumps(content))
    assert "not in its folder" in refused(sharded, "file_damaged")


@pytest.mark.parametrize("content", ["", "[]", "{", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "[" * 100000])
def test_damaged_index(sharded, content):
    next(sharded.glob("*.index.json")).write_text(content)
    refused(sharded, "file_damaged")


def test_an_index_that_contradicts_its_shards(sharded):
    index = next(sharded.glob("*.index.json"))
    content = json.loads(index.read_text())
    names = sorted(set(content["weight_map"].values()))
    name = next(n for n, shard in content["weight_map"].items() if shard == names[0])
    content["weight_map"][name] = names[1]
    index.write_text(json.dumps(content))
    assert name in refused(sharded, "file_damaged")


def test_a_tensor_in_two_shards(sharded, weights):
    next(sharded.glob("*.index.json")).unlink()
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    shutil.copy(first, second)
    assert "is also in" in refused(sharded, "file_damaged")


def test_folders_without_a_model(tmp_path, weights):
    assert "safetensors" in refused(tmp_path, "file_missing")
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "pickle" in refused(tmp_path, "file_missing")
    (tmp_path / "a.gguf").write_bytes(b"x")
    assert "a.gguf" in refused(tmp_path, "file_missing")
    (tmp_path / "transformer").mkdir()
    assert "whole pipeline" in refused(tmp_path, "file_missing")
    for name in ("a.safetensors", "b.safetensors"):
        layouts.write_plain(tmp_path / name, weights)
    assert "several models" in refused(tmp_path, "file_unsupported")


def test_components_of_a_diffusers_pipeline(tmp_path):
    names = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer", "scheduler")
    for name in names:
        (tmp_path / name).mkdir()
    assert component_folders(tmp_path) == {name: tmp_path / name for name in names[:-1]}


def test_components_of_an_original_repository(tmp_path, weights):
    for name in ("high_noise_model", "low_noise_model", "google/umt5-xxl"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "Wan2.1_VAE.safetensors").touch()
    assert component_folders(tmp_path) == {
        "transformer": tmp_path / "high_noise_model",
        "transformer_2": tmp_path / "low_noise_model",
        "vae": tmp_path / "Wan2.1_VAE.safetensors",
        "tokenizer": tmp_path / "google" / "umt5-xxl",
    }
    small = tmp_path / "Wan2.2-TI2V-5B"
    layouts.write_original_folder(small, weights)
    assert component_folders(small) == {"transformer": small}


def test_the_transformer_folder_beside_a_second_one_is_the_high_noise_expert(tmp_path, weights):
    for name in ("transformer", "transformer_2"):
        layouts.write_diffusers_folder(tmp_path / name, weights, {})
    experts = {name: open_checkpoint(tmp_path / name).identity.expert for name in ("transformer", "transformer_2")}
    assert experts == {"transformer": "high", "transformer_2": "low"}
    shutil.rmtree(tmp_path / "transformer_2")
    assert open_checkpoint(tmp_path / "transformer").identity.expert == "unknown"


def test_no_components(tmp_path):
    for path in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(CheckpointError) as caught:
            component_folders(path)
        assert caught.value.code == "file_missing"
