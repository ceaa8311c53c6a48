"""Files that are refused: damaged ones by their numbers, foreign ones by their name."""

import json
import pickle
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from wan_files import header_of, write_header

from wanfit.checkpoint import open_checkpoint
from wanfit.errors import CheckpointError, QuantError, WanFitError
from wanfit.tiny import layouts
from wanfit.tiny.gguf_layout import write_gguf
from wanfit.tiny.models import tiny_transformer, tiny_vae

LINEAR = "blocks.1.ffn.2.weight"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return tiny_transformer()


@pytest.fixture(scope="module")
def plain(weights, tmp_path_factory) -> Path:
    return layouts.write_plain(tmp_path_factory.mktemp("plain") / "m.safetensors", weights)


@pytest.fixture(scope="module")
def packed(weights, tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("packed") / "m.gguf", weights, "Q8_0")


def refused(path: Path, code: str, *texts: str, kind: type[WanFitError] = CheckpointError) -> None:
    with pytest.raises(kind) as caught:
        open_checkpoint(path)
    assert caught.value.code == code, caught.value
    assert str(path.name) in str(caught.value)
    for text in texts:
        assert text in str(caught.value)


def save(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> Path:
    save_file(tensors, path, metadata)
    return path


# ---- damaged safetensors


@pytest.mark.parametrize(
    ("cut", "texts"),
    [
        (0, ["0 bytes"]),
        (5, ["5 bytes"]),
        (9, ["9 bytes"]),
        (200, ["header is said to be", "200 bytes"]),
        (100_000, ["missing", "cut off"]),
        (-1, ["1 are missing"]),
    ],
)
def test_truncated(tmp_path, plain, cut, texts):
    path = tmp_path / "cut.safetensors"
    path.write_bytes(plain.read_bytes()[:cut])
    refused(path, "file_damaged", *texts)


def test_bytes_after_the_end(tmp_path, plain):
    path = tmp_path / "long.safetensors"
    path.write_bytes(plain.read_bytes() + b"more")
    refused(path, "file_damaged", "4 bytes after the last tensor")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**32])
def test_header_past_the_end(tmp_path, length):
    path = tmp_path / "m.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(64))
    refused(path, "file_damaged", str(length), "74 bytes")


def test_huge_header(tmp_path):
    path = tmp_path / "m.safetensors"
    with path.open("wb") as file:
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**30 + 8)
    refused(path, "file_damaged", str(2**30), "the limit is")


@pytest.mark.parametrize(
    "text", [b"[]", b"{", b"null", b"\xff\xfe{}", b"[" * 200_000, b'{"a": 1, "a": 2}', b'{"a": 1}', b'{"__metadata__": 3}',
             b'{"a": {"dtype": 3, "shape": [1], "data_offsets": [0, 4]}}', b'{"n": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_bad_json(tmp_path, text):
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    refused(path, "file_damaged")


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        ({"shape": [-4, 4]}, ["lacks a valid"]),
        ({"shape": [2**62, 2**62]}, ["impossible shape"]),
        ({"shape": [1] * 20}, ["impossible shape"]),
        ({"shape": [4, 5]}, ["needs 80 bytes", "gives it 64"]),
        ({"shape": [True, 16]}, ["lacks a valid"]),
        ({"shape": "4"}, ["lacks a valid"]),
        ({"data_offsets": [64, 0]}, ["gives it -64"]),
        ({"data_offsets": [0, 64, 64]}, ["lacks a valid"]),
        ({"data_offsets": [-64, 0]}, ["lacks a valid"]),
        ({"data_offsets": [10**9, 10**9 + 64]}, ["belong to nothing"]),
        ({"data_offsets": [32, 96]}, ["tensor b starts", "inside tensor a"]),
        ({"data_offsets": [72, 136]}, ["8 bytes between tensor a and tensor b"]),
    ],
)
def test_impossible_entries(tmp_path, change, texts):
    header = header_of({"a": ("F32", (4, 4)), "b": ("F32", (4, 4)), "c": ("F32", (4, 4))})
    header["b"] |= change
    refused(write_header(tmp_path / "m.safetensors", header, 192), "file_damaged", *texts)


@pytest.mark.parametrize("name", ["x" * 1000, "a\x1b[2J", "a\nb"])
def test_names_that_do_not_belong_on_a_terminal(tmp_path, name):
    refused(write_header(tmp_path / "m.safetensors", header_of({name: ("F32", (1,))})), "file_damaged", "is not valid")


def test_too_many_tensors(tmp_path):
    header = header_of({f"t{i}": ("U8", (0,)) for i in range(65_537)})
    refused(write_header(tmp_path / "m.safetensors", header), "file_damaged", "65537 tensors")


def test_unknown_dtype(tmp_path):
    header = header_of({"a": ("F32", (4, 4))})
    header["a"]["dtype"] = "F3_E1M1"
    refused(write_header(tmp_path / "m.safetensors", header), "format_unknown", "F3_E1M1", kind=QuantError)


# ---- damaged GGUF


def gguf_bytes(*, magic=b"GGUF", version=3, tensors=(), pairs=(), counts=None, data=b"") -> bytes:
    """A GGUF file by hand; tensors: (name, dims, type, offset); pairs: raw bytes."""
    n_tensors, n_pairs = counts or (len(tensors), len(pairs))
    out = magic + struct.pack("<IQQ", version, n_tensors, n_pairs) + b"".join(pairs)
    for name, dims, kind, offset in tensors:
        out += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return out + bytes(-len(out) % 32) + data


def text(value: str | bytes) -> bytes:
    raw = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str | bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def u32(value: int) -> bytes:
    return struct.pack("<I", value)


ALIGN = "general.alignment"


@pytest.mark.parametrize(
    ("content", "texts"),
    [
        (b"", ["0 bytes"]),
        (b"GG", ["2 bytes"]),
        (b"GGML" + bytes(60), ["does not start with GGUF"]),
        (gguf_bytes(counts=(2**40, 0)), [str(2**40)]),
        (gguf_bytes(counts=(0, 2**40)), [str(2**40)]),
        (gguf_bytes(counts=(3, 0)), ["needs 4 bytes", "32 bytes"]),
        (gguf_bytes(pairs=[struct.pack("<Q", 2**60) + b"k"]), [str(2**60)]),
        (gguf_bytes(pairs=[pair("k", 8, struct.pack("<Q", 2**63))]), [str(2**63)]),
        (gguf_bytes(pairs=[pair("k", 9, u32(4) + struct.pack("<Q", 2**50))]), [str(2**50), "elements"]),
        (gguf_bytes(pairs=[pair("k", 9, u32(4) + struct.pack("<Q", 2**20))]), ["4194304 bytes"]),
        (gguf_bytes(pairs=[pair("k", 9, u32(9) + struct.pack("<Q", 1))]), ["element type 9"]),
        (gguf_bytes(pairs=[pair("k", 99, u32(1))]), ["value type 99"]),
        (gguf_bytes(pairs=[pair("k", 4, u32(1))] * 2), ["occurs twice"]),
        (gguf_bytes(pairs=[pair(b"\xff\xfe", 4, u32(1))]), ["not valid"]),
        (gguf_bytes(pairs=[pair(ALIGN, 4, u32(0))]), ["alignment is 0"]),
        (gguf_bytes(pairs=[pair(ALIGN, 4, u32(48))]), ["alignment is 48"]),
        (gguf_bytes(pairs=[pair(ALIGN, 8, text("32"))]), ["alignment is '32'"]),
        (gguf_bytes(tensors=[("a", (32,), 0, 0)] * 2, data=bytes(256)), ["twice"]),
        (gguf_bytes(tensors=[("a", (1,) * 9, 0, 0)]), ["9 dimensions"]),
        (gguf_bytes(tensors=[("a", (2**31,) * 4, 0, 0)]), ["are missing"]),
        (gguf_bytes(tensors=[("a", (2**63, 2), 0, 0)]), ["impossible dimensions"]),
        (gguf_bytes(tensors=[("a", (0, 2), 0, 0)]), ["impossible dimensions"]),
        (gguf_bytes(tensors=[("a", (33, 2), 8, 0)], data=bytes(96)), ["rows of 33", "Q8_0 block of 32"]),
        (gguf_bytes(tensors=[("a", (128, 2), 12, 0)], data=bytes(160)), ["rows of 128", "Q4_K block of 256"]),
        (gguf_bytes(tensors=[("a", (32,), 0, 2**62)], data=bytes(128)), ["belong to nothing"]),
        (gguf_bytes(tensors=[("a", (32,), 0, 0), ("b", (32,), 0, 64)], data=bytes(192)), ["inside tensor a"]),
        (gguf_bytes(tensors=[("a", (32,), 0, 0), ("b", (32,), 0, 160)], data=bytes(288)), ["between tensor a"]),
        (gguf_bytes(tensors=[("a", (32,), 0, 0)], data=bytes(100)), ["28 are missing"]),
        (gguf_bytes(tensors=[("a", (32,), 0, 0)], data=bytes(999)), ["after the last tensor"]),
    ],
)  # fmt: skip
def test_damaged_gguf(tmp_path, content, texts):
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    refused(path, "file_damaged", *texts)


@pytest.mark.parametrize("orig", [(256, 36, 1, 2, 3), (-1,), ()])
def test_an_original_shape_of_another_size(tmp_path, weights, orig):
    path = tmp_path / "m.gguf"
    array = struct.pack(f"<IQ{len(orig)}i", 5, len(orig), *orig)
    path.write_bytes(
        gguf_bytes(
            pairs=[pair("comfy.gguf.orig_shape.a", 9, array)], tensors=[("a", (144, 256), 0, 0)], data=bytes(147456)
        )
    )
    refused(path, "file_damaged", "36864 elements")


def test_an_original_shape_across_blocks(tmp_path):
    path = tmp_path / "m.gguf"
    array = struct.pack("<IQ2i", 5, 2, 4, 16)
    path.write_bytes(
        gguf_bytes(pairs=[pair("comfy.gguf.orig_shape.a", 9, array)], tensors=[("a", (64,), 8, 0)], data=bytes(96))
    )
    refused(path, "format_unsupported", "Q8_0 blocks of 32", kind=QuantError)


def test_gguf_versions_and_byte_order(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(version=1))
    refused(path, "file_unsupported", "version 1")
    path.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    refused(path, "file_unsupported", "big-endian")


def test_unknown_gguf_type(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf_bytes(tensors=[("a", (32,), 999, 0)], data=bytes(128)))
    refused(path, "format_unknown", "999", kind=QuantError)


def test_truncated_gguf(tmp_path, packed):
    path = tmp_path / "m.gguf"
    path.write_bytes(packed.read_bytes()[:-4096])
    refused(path, "file_damaged", "4096 are missing")


def test_gguf_without_patch_embedding(tmp_path, weights):
    path = write_gguf(tmp_path / "raw.gguf", weights, "Q8_0", patch_embedding=False)
    refused(path, "tensors_missing", "patch_embedding.weight", "5-D")


# ---- not a model file


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".ckpt", ".bin", ".pkl"])
def test_pickles_are_refused_with_the_recipe_and_never_read(tmp_path, suffix):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "exploded",))

    path = tmp_path / f"model{suffix}"
    path.write_bytes(pickle.dumps(Bomb()))
    refused(path, "file_unsupported", "weights_only=True", "save_file")
    path = path.rename(tmp_path / "renamed.safetensors")
    with pytest.raises(CheckpointError):
        open_checkpoint(path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    ("name", "content", "code", "says"),
    [
        ("a.safetensors", b"PK\x03\x04" + bytes(99), "file_unsupported", "pickle"),
        ("a.safetensors", b"<!DOCTYPE html><html>" + bytes(99), "file_damaged", "web page"),
        ("a.gguf", b"<html>404</html>" + bytes(99), "file_damaged", "web page"),
        ("a.safetensors", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "file_damaged", "git lfs pull"),
        ("a.safetensors", b"GGUF" + bytes(99), "file_damaged", ".gguf"),
        ("a.txt", b"hello", "file_unsupported", ".safetensors or .gguf"),
        ("a", b"hello", "file_unsupported", ".safetensors or .gguf"),
    ],
)  # fmt: skip
def test_other_files(tmp_path, name, content, code, says):
    path = tmp_path / name
    path.write_bytes(content)
    refused(path, code, says)


def test_missing_file(tmp_path):
    refused(tmp_path / "nothing.safetensors", "file_missing")


# ---- other models


FOREIGN = {
    "Stable Diffusion": ["model.diffusion_model.input_blocks.0.0.weight", "first_stage_model.encoder.conv_in.weight"],
    "Flux": ["double_blocks.0.img_attn.proj.weight", "single_blocks.0.linear1.weight"],
    "Qwen-Image": ["transformer_blocks.0.img_mod.1.weight", "img_in.weight"],
    "LTX": ["transformer_blocks.0.attn1.to_q.weight", "patchify_proj.weight"],
    "CLIP vision": ["vision_model.encoder.layers.0.mlp.fc1.weight"],
    "language model": ["model.layers.0.self_attn.q_proj.weight", "lm_head.weight"],
    "0 of 1": ["something.else"],
}


@pytest.mark.parametrize("family", FOREIGN)
def test_other_families(tmp_path, family):
    path = save(tmp_path / "m.safetensors", {name: torch.zeros(2, 2) for name in FOREIGN[family]})
    refused(path, "model_unknown", family)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [("llama", ["blk.0.attn_q.weight", "token_embd.weight"]), ("wan", ["blk.0.attn_q.weight"]), ("flux", ["x"])],
)
def test_other_gguf_models_are_named_by_their_architecture(tmp_path, architecture, names):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", architecture)
    for name in names:
        writer.add_tensor(name, np.zeros((2, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(tmp_path / "m.gguf", "model_unknown", architecture)


@pytest.mark.parametrize(
    "name",
    ["diffusion_model.blocks.0.self_attn.q.lora_down.weight", "blocks.0.self_attn.q.lora_A.weight",
     "lora_unet_blocks_0_self_attn_q.lora_up.weight", "blocks.0.norm3.diff", "transformer.blocks.0.attn1.to_q.lora_B.default.weight"],
)  # fmt: skip
def test_loras(tmp_path, name):
    refused(save(tmp_path / "m.safetensors", {name: torch.zeros(2, 2)}), "model_unknown", "LoRA", name)


@pytest.mark.parametrize(
    ("sign", "title"),
    [
        ("vace_patch_embedding.weight", "VACE"),
        ("vace_blocks.0.norm3.weight", "VACE"),
        ("control_adapter.conv.weight", "camera"),
        ("casual_audio_encoder.weights", "S2V"),
        ("face_adapter.fuser_blocks.0.weight", "Animate"),
        ("motion_encoder.dec.weight", "Animate"),
        ("audio_proj.audio_proj_glob_1.layer.bias", "HuMo"),
        ("ref_conv.weight", "Fun-Control"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_other_wan_variants_are_named(tmp_path, weights, sign, title, prefix):
    tensors = {prefix + n: t for n, t in ({sign: torch.zeros(2, 2)} | weights).items()}
    refused(save(tmp_path / "m.safetensors", tensors), "model_unsupported", title, sign)


def test_wan_models_with_other_channels(tmp_path, weights):
    tensors = dict(weights)
    tensors["patch_embedding.weight"] = torch.zeros(256, 52, 1, 2, 2)
    refused(save(tmp_path / "m.safetensors", tensors), "model_unsupported", "52 channels in", "Fun-Control")
    tensors["patch_embedding.weight"] = torch.zeros(256, 20, 1, 2, 2)
    refused(save(tmp_path / "m.safetensors", tensors), "model_unsupported", "20 channels in")


def test_unexpected_tensors(tmp_path, weights):
    tensors = weights | {"blocks.0.new_thing.weight": torch.zeros(2)}
    refused(save(tmp_path / "m.safetensors", tensors), "model_unsupported", "blocks.0.new_thing.weight")
    tensors = weights | {"blocks.0.cross_attn.k_img.weight": torch.zeros(256, 256)}
    refused(save(tmp_path / "m.safetensors", tensors), "tensors_mismatch", "k_img")


def test_missing_tensors_are_named(tmp_path, weights):
    tensors = {n: t for n, t in weights.items() if ".norm3." not in n and n != "head.head.bias"}
    refused(save(tmp_path / "m.safetensors", tensors), "tensors_missing", "lacks 5 of 69", "blocks.0.norm3.weight")
    for anchor in ("head.modulation", "patch_embedding.weight", "blocks.0.ffn.0.weight", "text_embedding.0.weight"):
        tensors = {n: t for n, t in weights.items() if n != anchor}
        refused(save(tmp_path / "m.safetensors", tensors), "tensors_missing", anchor)
    tensors = {n.replace("blocks.1.", "blocks.7."): t for n, t in weights.items()}
    refused(save(tmp_path / "m.safetensors", tensors), "tensors_missing", "lacks 6 blocks", "blocks.1.*")


def test_shapes_that_contradict_each_other(tmp_path, weights):
    tensors = weights | {LINEAR: torch.zeros(256, 256), "head.modulation": torch.zeros(1, 2, 384)}
    refused(save(tmp_path / "m.safetensors", tensors), "tensors_mismatch", "[384")
    tensors = weights | {LINEAR: torch.zeros(256, 256)}
    refused(
        save(tmp_path / "m.safetensors", tensors),
        "tensors_mismatch",
        f"{LINEAR} is [256, 256] and should be [256, 512]",
    )
    tensors = weights | {"head.modulation": torch.zeros(1, 2, 0)}
    refused(save(tmp_path / "m.safetensors", tensors), "tensors_mismatch", "head.modulation")
    tensors = weights | {"patch_embedding.weight": torch.zeros(256)}
    refused(save(tmp_path / "m.safetensors", tensors), "tensors_mismatch", "patch_embedding.weight is [256]")


def test_a_t5_encoder_that_is_not_umt5(tmp_path):
    tensors = {"shared.weight": torch.zeros(8, 4)}
    for i in range(2):
        layer = f"encoder.block.{i}.layer"
        tensors |= {f"{layer}.0.SelfAttention.{x}.weight": torch.zeros(4, 4) for x in "qkvo"}
        tensors |= {f"{layer}.1.DenseReluDense.{x}.weight": torch.zeros(4, 4) for x in ("wi_0", "wi_1", "wo")}
    tensors["encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"] = torch.zeros(32, 2)
    refused(save(tmp_path / "t5xxl.safetensors", tensors), "model_unknown", "T5", "UMT5-XXL")


def test_a_vae_of_other_channels(tmp_path):
    weights = tiny_vae("vae-2.2")
    weights["decoder.conv1.weight"] = torch.zeros(32, 40, 3, 3, 3)
    refused(save(tmp_path / "v.safetensors", weights), "tensors_mismatch")


# ---- quantisation data


@pytest.fixture
def quantised(tmp_path, weights) -> dict[str, torch.Tensor]:
    return load_file(layouts.write_comfy_quant(tmp_path / "q.safetensors", weights))


LAYER = LINEAR.removesuffix(".weight")


def config(**values: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(values).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("nvfp4", lambda w: w[:, ::2].to(torch.uint8)),
        ("convrot_w4a4", lambda w: w[:, ::2].to(torch.int8)),
        ("asym_w4a8_int8", lambda w: w[:, ::2].to(torch.int8)),
        ("awq_w4a16", lambda w: w[:, ::2].to(torch.int8)),
        ("mxfp8", lambda w: w.to(torch.float8_e4m3fn)),
    ],
)
def test_newer_formats_are_recognised(tmp_path, weights, quantised, name, make):
    from wanfit.quant import FORMATS

    quantised[f"{LAYER}.weight"] = make(weights[LINEAR])
    quantised[f"{LAYER}.comfy_quant"] = config(format=name)
    checkpoint = open_checkpoint(save(tmp_path / "m.safetensors", quantised))
    assert checkpoint.identity.formats[name] == 1
    assert checkpoint.tensors[LINEAR].shape == (256, 512)
    if name in FORMATS:
        assert checkpoint.load(LINEAR).format == name
    else:
        with pytest.raises(QuantError) as caught:
            checkpoint.load(LINEAR)
        assert caught.value.code == "format_unsupported"
        assert name in str(caught.value) and caught.value.change


@pytest.mark.parametrize("kind", ["IQ3_S", "IQ2_XXS", "TQ2_0"])
def test_gguf_types_that_are_only_recognised(tmp_path, weights, kind):
    quant = gguf.GGMLQuantizationType[kind]
    block, block_bytes = gguf.GGML_QUANT_SIZES[quant]
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "wan")
    for name, tensor in weights.items():
        if name == LINEAR:
            writer.add_tensor(name, np.zeros((256, 512 // block * block_bytes), np.uint8), raw_dtype=quant)
        else:
            writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_checkpoint(tmp_path / "m.gguf")
    assert checkpoint.identity.formats[kind.lower()] == 1
    with pytest.raises(QuantError) as caught:
        checkpoint.load(LINEAR)
    assert caught.value.code == "format_unsupported" and kind.lower() in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "kind", "code", "says"),
    [
        ("comfy_quant", config(format="float3"), QuantError, "format_unknown", "float3"),
        ("comfy_quant", config(), QuantError, "format_unknown", "None"),
        ("comfy_quant", config(format="float8_e4m3fn", twist=2), QuantError, "format_unknown", "twist"),
        ("comfy_quant", config(format="float8_e4m3fn", full_precision_matrix_mult=3), CheckpointError, "file_damaged", "= 3"),
        ("comfy_quant", config(format="int8_tensorwise"), CheckpointError, "file_damaged", "stored as f8_e4m3"),
        ("comfy_quant", torch.zeros(8, dtype=torch.uint8), CheckpointError, "file_damaged", "no valid JSON"),
        ("comfy_quant", torch.tensor(list(b"[1]"), dtype=torch.uint8), CheckpointError, "file_damaged", "no JSON object"),
        ("comfy_quant", torch.zeros(70000, dtype=torch.uint8), CheckpointError, "file_damaged", "70000 bytes"),
        ("weight_scale", torch.zeros(3), QuantError, "format_unsupported", "[3]"),
        ("weight_scale", torch.zeros(2, 4), QuantError, "format_unsupported", "[2, 4]"),
        ("weight_scale", torch.zeros(1, dtype=torch.int32), QuantError, "format_unsupported", "i32"),
        ("weight_scale_2", torch.zeros(1), QuantError, "format_unsupported", "scale_2"),
        ("scale_weight", torch.zeros(1), CheckpointError, "file_damaged", "two tensors for its scale"),
        ("weight", None, CheckpointError, "file_damaged", "no weight tensor"),
        ("weight_scale", None, CheckpointError, "file_damaged", "has no scale"),
    ],
)  # fmt: skip
def test_contradictions_in_quantisation_data(tmp_path, quantised, key, value, kind, code, says):
    if value is None:
        del quantised[f"{LAYER}.{key}"]
    else:
        quantised[f"{LAYER}.{key}"] = value
    refused(save(tmp_path / "m.safetensors", quantised), code, says, kind=kind)


@pytest.mark.parametrize("text", ["", "[]", '{"layers": 3}', '{"layers": {"a": 1}}', "{}", "[" * 100_000])
def test_damaged_quantization_metadata(tmp_path, quantised, text):
    path = save(tmp_path / "m.safetensors", quantised, {"_quantization_metadata": text})
    refused(path, "file_damaged", "_quantization_metadata")


def test_header_and_tensors_that_disagree(tmp_path, quantised):
    text = json.dumps({"layers": {LAYER: {"format": "int8_tensorwise"}}})
    path = save(tmp_path / "m.safetensors", quantised, {"_quantization_metadata": text})
    refused(path, "file_damaged", "contradict each other")


def test_scales_of_16_bit_weights(tmp_path, weights):
    tensors = weights | {f"{LAYER}.scale_weight": torch.ones(())}
    refused(save(tmp_path / "m.safetensors", tensors), "format_unsupported", LINEAR, kind=QuantError)


def test_int8_without_a_scale(tmp_path, weights):
    tensors = weights | {LINEAR: weights[LINEAR].to(torch.int8)}
    refused(save(tmp_path / "m.safetensors", tensors), "file_damaged", "has no scale")
