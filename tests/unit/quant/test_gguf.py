"""GGUF types against gguf-py: float32 bit for bit, lower dtypes equal to the rounded float32 reference."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
import torch

from wanfit.errors import QuantError
from wanfit.quant import StoredWeight, dequantize, gather_rows


def as_weight(key: str, data: np.ndarray | torch.Tensor, shape: tuple[int, ...] | None = None) -> StoredWeight:
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[key.upper()]]
    tensor = data if isinstance(data, torch.Tensor) else torch.from_numpy(data)
    return StoredWeight(key, shape or (data.shape[0], data.shape[1] // size * elements), tensor)


def same_bits(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal to the last bit, the sign of zero included; any NaN equals any NaN."""
    return bool(np.all((a.view(np.uint32) == b.view(np.uint32)) | (np.isnan(a) & np.isnan(b))))


@pytest.mark.parametrize("seed", range(3))
def test_float32_is_bit_equal_to_gguf(gguf_key, gguf_bytes, gguf_reference, seed):
    data = gguf_bytes(gguf_key, seed=seed)
    reference = gguf_reference(gguf_key, data)
    assert np.abs(reference).max() > 1e5 or gguf_key.startswith("q4_"), "the largest scale is in the data"
    result = dequantize(as_weight(gguf_key, data), torch.float32)
    assert result.dtype == torch.float32 and result.is_contiguous()
    assert same_bits(result.numpy(), reference)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_infinite_and_nan_scales_behave_as_in_gguf(gguf_key, gguf_bytes, gguf_reference):
    # Random float16 fields: about 6 % of 600 are infinite or NaN.
    rng = np.random.default_rng(5)
    data = gguf_bytes(gguf_key, rows=200)
    data = rng.integers(0, 256, data.shape, dtype=np.uint8)
    reference = gguf_reference(gguf_key, data)
    assert not np.isfinite(reference).all()
    assert same_bits(dequantize(as_weight(gguf_key, data), torch.float32).numpy(), reference)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_lower_dtypes_are_the_rounded_float32(gguf_key, gguf_bytes, gguf_reference, dtype):
    data = gguf_bytes(gguf_key)
    reference = torch.from_numpy(gguf_reference(gguf_key, data)).to(dtype)
    result = dequantize(as_weight(gguf_key, data), dtype)
    assert torch.equal(result.view(torch.int16), reference.view(torch.int16))


def test_strides_and_read_only_maps(gguf_key, gguf_bytes, tmp_path):
    data = gguf_bytes(gguf_key, rows=6, extremes=False)
    expected = dequantize(as_weight(gguf_key, data), torch.float32)
    tensor = torch.from_numpy(data)
    inside = torch.zeros(6, data.shape[1] + 5, dtype=torch.uint8)
    inside[:, 3:-2] = tensor  # rows apart, at an odd byte
    transposed = tensor.T.contiguous().T
    for variant in (inside[:, 3:-2], transposed, torch.cat([tensor, tensor], 1)[:, : data.shape[1]]):
        assert not variant.is_contiguous()
        before = variant.clone()
        assert torch.equal(dequantize(as_weight(gguf_key, variant), torch.float32), expected)
        assert torch.equal(variant, before)
    file = tmp_path / "weights.bin"
    file.write_bytes(b"\0" * 32 + data.tobytes())
    mapped = np.memmap(file, np.uint8, "r", 32, data.shape)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        view = torch.from_numpy(mapped)
    # Writing to it would end the process.
    assert torch.equal(dequantize(as_weight(gguf_key, view), torch.float32), expected)
    assert torch.equal(gather_rows(as_weight(gguf_key, view), torch.tensor([2]), torch.float32), expected[2:3])


def test_more_dimensions_than_two(gguf_key, gguf_bytes):
    data = gguf_bytes(gguf_key, rows=12, extremes=False)
    flat = dequantize(as_weight(gguf_key, data), torch.float32)
    shaped = dequantize(as_weight(gguf_key, data, (2, 3, 2, flat.shape[1])), torch.float32)
    assert torch.equal(shaped.reshape(flat.shape), flat)
    one_row = dequantize(as_weight(gguf_key, data[:1], (flat.shape[1],)), torch.float32)
    assert torch.equal(one_row, flat[0])


@pytest.mark.parametrize("shape", [(0, 512), (4, 0), (3, 512), (4, 511), (4, 256)])
def test_empty_and_contradicting_shapes_are_refused(shape):
    data = torch.zeros(4, 2 * 144, dtype=torch.uint8)
    with pytest.raises(QuantError) as caught:
        dequantize(StoredWeight("q4_k", shape, data), torch.float32)
    assert caught.value.code == "file_damaged"


def test_wrong_stored_dtype_is_refused():
    with pytest.raises(QuantError, match="file_damaged"):
        dequantize(StoredWeight("q4_k", (1, 256), torch.zeros(1, 144, dtype=torch.int8)), torch.float32)


def test_gathered_rows_equal_the_whole(gguf_key, gguf_bytes):
    weight = as_weight(gguf_key, gguf_bytes(gguf_key, extremes=False))
    whole = dequantize(weight, torch.bfloat16)
    index = torch.tensor([[5, 0, 5], [21, 1, 7]])
    assert torch.equal(gather_rows(weight, index, torch.bfloat16), whole[index])
    assert gather_rows(weight, index[:0], torch.bfloat16).shape == (0, 3, whole.shape[1])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_cuda_is_bit_equal_to_the_cpu(gguf_key, gguf_bytes, dtype):
    weight = as_weight(gguf_key, gguf_bytes(gguf_key))
    there = dequantize(weight.to("cuda"), dtype).cpu()
    assert torch.equal(there.view(torch.uint8), dequantize(weight, dtype).view(torch.uint8))
