"""Every layout read back: stored bytes against other readers, values against other decoders."""

import gc
import warnings

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from wan_files import decode_float8

from wanfit.checkpoint import open_checkpoint
from wanfit.quant import dequantize
from wanfit.tiny import gguf_layout, layouts
from wanfit.tiny.models import tiny_transformer, tiny_vae

LINEAR = "blocks.1.ffn.2.weight"


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    return tiny_transformer()


def raw(path, name: str) -> torch.Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name)


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "diffusion_model.", "model."])
@pytest.mark.parametrize("diffusers_names", [False, True])
def test_plain(tmp_path, weights, dtype, prefix, diffusers_names):
    path = layouts.write_plain(
        tmp_path / "m.safetensors", weights, dtype=dtype, prefix=prefix, diffusers_names=diffusers_names
    )
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.container == "safetensors"
        assert checkpoint.tensors.keys() == weights.keys()
        for name, tensor in weights.items():
            stored, info = checkpoint.load(name), checkpoint.tensors[name]
            assert torch.equal(stored.data, tensor.to(dtype))
            assert stored.shape == info.shape == tuple(tensor.shape)
            assert info.stored_name.startswith(prefix)
            assert torch.equal(stored.data, raw(path, info.stored_name))
            with path.open("rb") as file:
                file.seek(info.offset)
                assert file.read(info.nbytes) == stored.data.view(torch.uint8).numpy().tobytes()
    assert checkpoint.nbytes == sum(t.numel() for t in weights.values()) * dtype.itemsize


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_plain_float8(tmp_path, weights, dtype):
    path = layouts.write_plain(tmp_path / "m.safetensors", weights, linear_dtype=dtype)
    checkpoint = open_checkpoint(path)
    stored = checkpoint.load(LINEAR)
    assert not stored.params
    assert torch.equal(dequantize(stored, torch.float64), decode_float8(raw(path, LINEAR)))
    assert checkpoint.load("blocks.0.modulation").format == "f16"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_comfy_scaled(tmp_path, weights, dtype, prefix):
    path = layouts.write_comfy_scaled(tmp_path / "m.safetensors", weights, dtype=dtype, prefix=prefix)
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors.keys() == weights.keys()
    assert set(checkpoint.identity.formats) == {"f8_e4m3" if dtype == torch.float8_e4m3fn else "f8_e5m2", "f16"}
    linears = set(layouts.linear_names(weights))
    assert len(linears) == 26
    for name in linears:
        stored = checkpoint.load(name)
        assert set(stored.params) == {"scale"}  # the input scale of 1.0 means that there is none
        assert stored.params["scale"].shape == ()
        assert not stored.options
        scale = raw(path, prefix + name.removesuffix("weight") + "scale_weight")
        expected = decode_float8(raw(path, prefix + name)) * scale.double()
        # one rounding of value * scale to float32
        torch.testing.assert_close(dequantize(stored, torch.float32).double(), expected, rtol=1e-6, atol=0)
        # three mantissa bits (e4m3) leave 2.6 % on normal numbers, two (e5m2) 5.2 %
        assert relative_error(expected, weights[name]) < (0.04 if dtype == torch.float8_e4m3fn else 0.08)
    for name in weights.keys() - linears:
        assert torch.equal(checkpoint.load(name).data, weights[name].half())


def test_comfy_scaled_markers_and_input_scale(tmp_path, weights):
    path = layouts.write_comfy_scaled(
        tmp_path / "m.safetensors", weights, full_precision=True, float32_marker=True, input_scale=0.25
    )
    assert raw(path, "scaled_fp8").dtype == torch.float32
    stored = open_checkpoint(path).load(LINEAR)
    assert stored.format == "f8_e4m3"
    assert stored.options == {"full_precision_matmul": True}
    assert float(stored.params["input_scale"]) == 0.25


def test_kijai_scaled(tmp_path, weights):
    path = layouts.write_kijai_scaled(tmp_path / "m.safetensors", weights)
    checkpoint = open_checkpoint(path)
    assert dict(checkpoint.identity.formats) == {"f32": len(weights) - 20, "f8_e4m3": 20}
    stored = checkpoint.load(LINEAR)
    assert relative_error(dequantize(stored, torch.float32), weights[LINEAR]) < 0.04
    assert checkpoint.load("text_embedding.0.weight").format == "f32"


@pytest.mark.parametrize("in_header", [False, True])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_comfy_quant_float8(tmp_path, weights, dtype, prefix, in_header):
    path = layouts.write_comfy_quant(
        tmp_path / "m.safetensors", weights, dtype=dtype, prefix=prefix, in_header=in_header, full_precision=True
    )
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensors.keys() == weights.keys()
    stored = checkpoint.load(LINEAR)
    assert stored.options == {"full_precision_matmul": True}
    scale = raw(path, prefix + LINEAR.removesuffix("weight") + "weight_scale")
    expected = decode_float8(raw(path, prefix + LINEAR)) * scale.double()
    torch.testing.assert_close(dequantize(stored, torch.float32).double(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("in_header", [False, True])
def test_int8(tmp_path, weights, per_row, in_header):
    path = layouts.write_comfy_quant(
        tmp_path / "m.safetensors", weights, dtype=torch.int8, per_row=per_row, in_header=in_header
    )
    stored = open_checkpoint(path).load(LINEAR)
    assert stored.format == "int8"
    assert stored.params["scale"].shape == ((256, 1) if per_row else ())
    scale = raw(path, LINEAR.removesuffix("weight") + "weight_scale")
    expected = raw(path, LINEAR).double() * scale.double()
    torch.testing.assert_close(dequantize(stored, torch.float32).double(), expected, rtol=1e-6, atol=0)
    assert relative_error(expected, weights[LINEAR]) < 0.02  # a step of peak / 127, peaks of 4 sigma


def test_int8_rotated(tmp_path, weights):
    path = layouts.write_comfy_quant(tmp_path / "m.safetensors", weights, dtype=torch.int8, convrot_groupsize=256)
    stored = open_checkpoint(path).load(LINEAR)
    assert stored.options == {"convrot": True, "convrot_groupsize": 256}
    assert relative_error(dequantize(stored, torch.float32), weights[LINEAR]) < 0.02
    assert relative_error(stored.data.float() * stored.params["scale"], weights[LINEAR]) > 1  # rotated indeed


@pytest.mark.parametrize(
    ("file_type", "bf16_source"), [*((t, False) for t in gguf_layout.FILE_TYPES), ("Q8_0", True), ("Q4_K_M", True)]
)
def test_gguf(tmp_path, weights, file_type, bf16_source):
    path = gguf_layout.write_gguf(tmp_path / "m.gguf", weights, file_type, bf16_source=bf16_source)
    checkpoint = open_checkpoint(path)
    assert checkpoint.container == "gguf"
    assert checkpoint.metadata["general.architecture"] == "wan"
    assert checkpoint.tensors.keys() == weights.keys()
    types = gguf_layout.tensor_types({n: tuple(t.shape) for n, t in weights.items()}, file_type, bf16_source)
    other = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert other.keys() == weights.keys()
    for name, tensor in weights.items():
        stored = checkpoint.load(name)
        assert stored.format == types[name].lower()
        assert stored.shape == tuple(tensor.shape)
        expected = gguf.dequantize(other[name].data, other[name].tensor_type).reshape(stored.shape)
        ours = dequantize(stored, torch.float32).numpy()
        # gguf-py and quant order their float32 products differently
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("architecture", ["wan", "pig", "cow", ""])
def test_gguf_architecture_is_only_a_label(tmp_path, weights, architecture):
    path = gguf_layout.write_gguf(tmp_path / "m.gguf", weights, "Q8_0", architecture=architecture)
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata.get("general.architecture", "") == architecture
    assert checkpoint.identity.variant == "i2v-a14b"


def test_gguf_original_shape(tmp_path, weights):
    path = gguf_layout.write_gguf(tmp_path / "m.gguf", weights, "Q8_0", flat_patch_embedding=True)
    stored = open_checkpoint(path).load("patch_embedding.weight")
    assert stored.shape == (256, 36, 1, 2, 2)
    assert torch.equal(stored.data, weights["patch_embedding.weight"])


@pytest.mark.parametrize("variant", ["vae-2.1", "vae-2.2"])
@pytest.mark.parametrize("prefix", ["", "first_stage_model.", "vae."])
@pytest.mark.parametrize("diffusers_names", [False, True])
def test_vae(tmp_path, variant, prefix, diffusers_names):
    weights = tiny_vae(variant)
    path = layouts.write_plain(
        tmp_path / "v.safetensors", weights, dtype=torch.bfloat16, prefix=prefix, diffusers_names=diffusers_names
    )
    checkpoint = open_checkpoint(path)
    assert (checkpoint.identity.kind, checkpoint.identity.variant) == ("vae", variant)
    assert checkpoint.tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(checkpoint.load(name).data, tensor.bfloat16())


def test_float8_stored_as_bytes(tmp_path, weights):
    path = layouts.write_comfy_quant(tmp_path / "m.safetensors", weights)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tensors[LINEAR] = tensors[LINEAR].view(torch.uint8)
    layouts.save_file(tensors, tmp_path / "bytes.safetensors")
    stored = open_checkpoint(tmp_path / "bytes.safetensors").load(LINEAR)
    assert torch.equal(stored.data.view(torch.uint8), open_checkpoint(path).load(LINEAR).data.view(torch.uint8))


def test_views_outlive_the_checkpoint(tmp_path, weights):
    path = layouts.write_plain(tmp_path / "m.safetensors", weights, dtype=torch.float32)
    with open_checkpoint(path) as checkpoint:
        stored = checkpoint.load(LINEAR)
    with pytest.raises(ValueError, match="closed"):
        checkpoint.load(LINEAR)
    del checkpoint
    gc.collect()
    assert torch.equal(stored.data, weights[LINEAR])


def test_loading_copies_nothing_and_warns_of_nothing(tmp_path, weights):
    path = layouts.write_plain(tmp_path / "m.safetensors", weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint = open_checkpoint(path)
        first, second = checkpoint.load(LINEAR), checkpoint.load(LINEAR)
        other = checkpoint.load("blocks.0.norm3.bias")
    assert first.data.data_ptr() == second.data.data_ptr()
    info, other_info = checkpoint.tensors[LINEAR], checkpoint.tensors["blocks.0.norm3.bias"]
    assert first.data.data_ptr() - other.data.data_ptr() == info.offset - other_info.offset


def test_misaligned_tensors_are_read_by_copying(tmp_path, weights):
    path = layouts.write_plain(tmp_path / "m.safetensors", weights, dtype=torch.float32)
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    odd = (length + 1).to_bytes(8, "little") + content[8 : 8 + length] + b" " + content[8 + length :]
    path = tmp_path / "odd.safetensors"
    path.write_bytes(odd)
    assert torch.equal(open_checkpoint(path).load(LINEAR).data, weights[LINEAR])


def test_all_in_one_checkpoints_give_their_transformer(tmp_path, weights):
    tensors = {f"model.diffusion_model.{n}": t for n, t in weights.items()}
    tensors |= {f"first_stage_model.{n}": t for n, t in tiny_vae().items()}
    layouts.save_file(tensors, tmp_path / "all.safetensors")
    assert open_checkpoint(tmp_path / "all.safetensors").tensors.keys() == weights.keys()


def test_unknown_names_are_a_key_error(tmp_path, weights):
    checkpoint = open_checkpoint(layouts.write_plain(tmp_path / "m.safetensors", weights))
    with pytest.raises(KeyError):
        checkpoint.load("blocks.2.norm3.bias")


@pytest.mark.parametrize("shape", [(), (1,), (256,), (256, 1)])
def test_scales_without_a_marker(tmp_path, weights, shape):
    """lightx2v's files: `weight_scale` for each row, and nothing that names the format."""
    scale = torch.rand(shape) + 0.5
    tensors = weights | {LINEAR: weights[LINEAR].to(torch.float8_e4m3fn)}
    layouts.save_file(tensors | {LINEAR + "_scale": scale}, tmp_path / "m.safetensors")
    stored = open_checkpoint(tmp_path / "m.safetensors").load(LINEAR)
    expected = decode_float8(tensors[LINEAR]) * (scale.double() if scale.numel() == 1 else scale.double().view(256, 1))
    torch.testing.assert_close(dequantize(stored, torch.float32).double(), expected, rtol=1e-6, atol=0)
