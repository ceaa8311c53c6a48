"""float8, int8, mxfp8 and nvfp4 against definitions written out here in numpy, byte by byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wanfit.errors import QuantError
from wanfit.quant import FORMATS, StoredWeight, check_format, dequantize, gather_rows

FLOAT8 = {"f8_e4m3": (4, 3, torch.float8_e4m3fn), "f8_e5m2": (5, 2, torch.float8_e5m2)}
NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.cuda, NEEDS_CUDA])]


def float8_value(byte: int, exponent_bits: int, mantissa_bits: int) -> float:
    """IEEE-like decoding by hand; e4m3fn has no infinity and one NaN, e5m2 has both."""
    sign = -1.0 if byte & 0x80 else 1.0
    exponent = (byte & 0x7F) >> mantissa_bits
    mantissa = byte & ((1 << mantissa_bits) - 1)
    bias = (1 << (exponent_bits - 1)) - 1
    if exponent_bits == 4 and byte & 0x7F == 0x7F:
        return float("nan")
    if exponent_bits == 5 and exponent == 31:
        return float("nan") if mantissa else sign * float("inf")
    if exponent == 0:
        return sign * mantissa * 2.0 ** (1 - bias - mantissa_bits)
    return sign * (1 + mantissa / (1 << mantissa_bits)) * 2.0 ** (exponent - bias)


def all_bytes() -> torch.Tensor:
    return torch.arange(256, dtype=torch.uint8).reshape(8, 32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("key", FLOAT8)
@pytest.mark.parametrize("scale", [None, 0.0123, "scalar1", "rows", "column"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float8_all_256_values(key, scale, dtype, device):
    exponent_bits, mantissa_bits, stored = FLOAT8[key]
    table = np.array([float8_value(b, exponent_bits, mantissa_bits) for b in range(256)], np.float32).reshape(8, 32)
    rows = torch.linspace(-0.7, 3.1, 8)
    tensor, factor = {
        None: (None, np.ones((1, 1), np.float32)),
        0.0123: (torch.tensor(0.0123), np.float32(0.0123)),
        "scalar1": (torch.tensor([0.0123]), np.float32(0.0123)),
        "rows": (rows, rows.numpy()[:, None]),
        "column": (rows[:, None], rows.numpy()[:, None]),
    }[scale]
    weight = StoredWeight(key, (8, 32), all_bytes().view(stored), {} if tensor is None else {"scale": tensor})
    with np.errstate(invalid="ignore"):
        expected = torch.from_numpy(table * factor).to(dtype)
    result = dequantize(weight.to(device), dtype).cpu()
    assert result.dtype == dtype
    torch.testing.assert_close(result, expected, rtol=0, atol=0, equal_nan=True)


def test_a_scale_survives_bfloat16():
    # 1 + 2^-9 is no bfloat16: scaling in bfloat16 would lose it. 1.875 * (1 + 2^-9) rounds up, 1.875 does not.
    weight = StoredWeight(
        "f8_e4m3", (1, 1), torch.tensor([[1.875]]).to(torch.float8_e4m3fn), {"scale": torch.tensor(1.0078125 + 2**-9)}
    )
    assert dequantize(weight, torch.bfloat16).item() == torch.tensor(1.875 * (1.0078125 + 2**-9)).bfloat16().item()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (6,), (6, 1)])
def test_int8(shape, dtype, device):
    rng = np.random.default_rng(1)
    q = rng.integers(-128, 128, (6, 64), dtype=np.int8)
    scale = rng.random(shape, dtype=np.float32) - np.float32(0.3)
    expected = q.astype(np.float32) * (scale if scale.ndim != 1 else scale[:, None])
    weight = StoredWeight("int8", (6, 64), torch.from_numpy(q), {"scale": torch.tensor(scale)})
    assert torch.equal(dequantize(weight.to(device), dtype).cpu(), torch.from_numpy(expected).to(dtype))
    index = torch.tensor([4, 4, 1], device=device)
    assert torch.equal(
        gather_rows(weight.to(device), index, dtype).cpu(), torch.from_numpy(expected[[4, 4, 1]]).to(dtype)
    )


def regular_hadamard(size: int) -> np.ndarray:
    """By its entries: the sign is the product over the base-4 digits of -1 where two digits add up to 3."""
    i, j = np.indices((size, size))
    signs = np.ones((size, size))
    while size > 1:
        signs[(i % 4) + (j % 4) == 3] *= -1
        i, j, size = i // 4, j // 4, size // 4
    return signs / np.sqrt(len(signs))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [4, 16, 64, 256])
def test_int8_convrot_returns_to_the_original_basis(size, device):
    rng = np.random.default_rng(size)
    hadamard = regular_hadamard(size)
    np.testing.assert_allclose(hadamard @ hadamard.T, np.eye(size), atol=1e-12)
    original = rng.standard_normal((10, 512))
    rotated = (original.reshape(10, -1, size) @ hadamard.T).reshape(10, 512)
    scale = np.abs(rotated).max(1, keepdims=True) / 127
    q = np.rint(rotated / scale).astype(np.int8)
    weight = StoredWeight(
        "int8", (10, 512), torch.from_numpy(q), {"scale": torch.from_numpy(scale).float()}, {"convrot_groupsize": size}
    )
    result = dequantize(weight.to(device), torch.float32).cpu()
    # In float64 from the stored numbers; the code's only roundings are the scale's and the product's in float32.
    expected = ((q * scale.astype(np.float32).astype(np.float64)).reshape(10, -1, size) @ hadamard).reshape(10, 512)
    np.testing.assert_allclose(result.numpy(), expected, rtol=2e-7, atol=1e-12)
    assert np.linalg.norm(result.numpy() - original) < 0.01 * np.linalg.norm(original)
    assert torch.equal(gather_rows(weight.to(device), torch.tensor([3]), torch.float32).cpu(), result[3:4])


@pytest.mark.parametrize("size", [2, 8, 100, 1024])
def test_int8_convrot_group_that_cannot_be(size):
    weight = StoredWeight(
        "int8", (2, 512), torch.zeros(2, 512, dtype=torch.int8), {"scale": torch.ones(())}, {"convrot_groupsize": size}
    )
    with pytest.raises(QuantError, match="format_unsupported"):
        dequantize(weight, torch.float32)


def blocked_position(row: int, column: int, columns: int) -> int:
    """Offset of the scale of (row, column) in cuBLAS's block order, from NVIDIA's documentation."""
    tiles_wide = -(-columns // 4)
    tile = (row // 128) * tiles_wide + column // 4
    return tile * 512 + (row % 32) * 16 + ((row % 128) // 32) * 4 + column % 4


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(64, 256), (130, 96), (257, 160), (100, 90)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp8(shape, dtype, device):
    rng = np.random.default_rng(2)
    rows, columns = (-(-n // 32) * 32 for n in shape)
    codes = rng.integers(0, 256, (rows, columns), dtype=np.uint8)
    codes[codes & 0x7F == 0x7F] = 0  # no NaN
    exponents = rng.integers(100, 140, (rows, columns // 32), dtype=np.uint8)
    exponents[3, 1] = 0
    blocked = np.zeros(-(-rows // 128) * 128 * -(-columns // 128) * 4, np.uint8)
    expected = np.zeros((rows, columns), np.float32)
    table = np.array([float8_value(b, 4, 3) for b in range(256)], np.float32)
    for row in range(rows):
        for column in range(columns // 32):
            blocked[blocked_position(row, column, columns // 32)] = exponents[row, column]
            factor = np.float32(2.0 ** (int(exponents[row, column]) - 127)) if exponents[row, column] else np.float32(0)
            span = slice(column * 32, column * 32 + 32)
            expected[row, span] = table[codes[row, span]] * factor
    scale = torch.from_numpy(blocked).reshape(-1, -(-columns // 128) * 4)
    weight = StoredWeight("mxfp8", shape, torch.from_numpy(codes).view(torch.float8_e4m3fn), {"scale": scale})
    result = dequantize(weight.to(device), dtype).cpu()
    assert torch.equal(result, torch.from_numpy(expected[: shape[0], : shape[1]]).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(64, 256), (130, 96), (257, 160), (100, 90)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4(shape, dtype, device):
    rng = np.random.default_rng(3)
    rows, columns = (-(-n // 16) * 16 for n in shape)
    packed = rng.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
    scales = rng.integers(0, 0x7F, (rows, columns // 16), dtype=np.uint8)
    tensor_scale = np.float32(0.00037)
    magnitude = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    blocked = np.zeros(-(-rows // 128) * 128 * -(-columns // 64) * 4, np.uint8)
    expected = np.zeros((rows, columns), np.float32)
    for row in range(rows):
        for column in range(columns // 16):
            blocked[blocked_position(row, column, columns // 16)] = scales[row, column]
            factor = np.float32(float8_value(int(scales[row, column]), 4, 3)) * tensor_scale
            for k in range(8):
                byte = int(packed[row, column * 8 + k])
                for offset, code in ((0, byte >> 4), (1, byte & 15)):
                    value = magnitude[code & 7] * np.float32(-1 if code & 8 else 1)
                    expected[row, column * 16 + 2 * k + offset] = value * factor
    params = {"scale": torch.from_numpy(blocked), "scale_2": torch.tensor(tensor_scale)}
    weight = StoredWeight("nvfp4", shape, torch.from_numpy(packed), params)
    # torch.equal takes -0 for 0, which is what the code makes of a stored -0.
    assert torch.equal(
        dequantize(weight.to(device), dtype).cpu(), torch.from_numpy(expected[: shape[0], : shape[1]]).to(dtype)
    )


def test_plain_floats_are_casts():
    for key, stored in (("f32", torch.float32), ("f16", torch.float16), ("bf16", torch.bfloat16)):
        value = torch.randn(3, 4, 5).to(stored)
        weight = StoredWeight(key, (3, 4, 5), value)
        assert dequantize(weight, stored) is value
        assert torch.equal(dequantize(weight, torch.float32), value.float())
    scalar = torch.tensor(2.5)
    assert dequantize(StoredWeight("f32", (), scalar), torch.bfloat16).item() == 2.5


@pytest.mark.parametrize(
    ("weight", "code"),
    [
        (StoredWeight("int8", (2, 4), torch.zeros(2, 4, dtype=torch.int8)), "tensors_missing"),
        (StoredWeight("int8", (2, 4), torch.zeros(2, 4, dtype=torch.int8), {"scale": torch.ones(3)}), "file_damaged"),
        (StoredWeight("int8", (2, 5), torch.zeros(2, 4, dtype=torch.int8), {"scale": torch.ones(2)}), "file_damaged"),
        (StoredWeight("f32", (2, 4), torch.zeros(2, 4, dtype=torch.float16)), "file_damaged"),
        (StoredWeight("f32", (0, 4), torch.zeros(0, 4)), "file_damaged"),
        (StoredWeight("nvfp4", (16, 16), torch.zeros(16, 8, dtype=torch.uint8)), "tensors_missing"),
        (StoredWeight("nvfp4", (16, 64), torch.zeros(16, 36, dtype=torch.uint8)), "file_damaged"),
        (
            StoredWeight("nvfp4", (16, 16), torch.zeros(16, 8, dtype=torch.uint8), {"pre_quant_scale": torch.ones(16)}),
            "format_unsupported",
        ),
        (
            StoredWeight(
                "mxfp8",
                (32, 32),
                torch.zeros(32, 32).to(torch.float8_e4m3fn),
                {"scale": torch.zeros(32, dtype=torch.uint8)},
            ),
            "file_damaged",
        ),
        (StoredWeight("asym_w4a8_int8", (2, 4), torch.zeros(2, 2, dtype=torch.int8)), "format_unsupported"),
        (StoredWeight("iq2_xxs", (2, 4), torch.zeros(2, 2, dtype=torch.uint8)), "format_unsupported"),
        (StoredWeight("q9_9", (2, 4), torch.zeros(2, 2, dtype=torch.uint8)), "format_unknown"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.format}{value.shape}",
)
def test_refusals(weight, code):
    with pytest.raises(QuantError) as caught:
        dequantize(weight, torch.float32)
    assert caught.value.code == code
    assert weight.format in str(caught.value)
    assert caught.value.change


def test_check_format_knows_the_table():
    for name in FORMATS:
        check_format(name)
    with pytest.raises(QuantError, match="GGUF file"):
        check_format("convrot_w4a4")


@pytest.mark.parametrize("key", ["mxfp8", "nvfp4", "q4_k"])
def test_gather_refuses_what_has_no_rows(key):
    weight = StoredWeight(key, (2, 2, 256), torch.zeros(4, 144, dtype=torch.uint8))
    with pytest.raises(QuantError, match="format_unsupported"):
        gather_rows(weight, torch.tensor([0]), torch.float32)
