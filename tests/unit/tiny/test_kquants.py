"""Blocks written by `wanfit.tiny.kquants`, read by gguf-py."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from wanfit.errors import QuantError
from wanfit.tiny.kquants import quantize

# Largest relative error (Frobenius norm) over 64 x 1024 normal values; measured on seed 0, plus about a tenth.
BOUNDS = {
    "BF16": 0.002, "Q8_0": 0.006, "Q6_K": 0.021, "Q5_K": 0.042, "Q5_0": 0.047, "Q5_1": 0.045,
    "Q4_K": 0.085, "Q4_0": 0.095, "Q4_1": 0.092, "IQ4_NL": 0.083, "IQ4_XS": 0.088, "Q3_K": 0.17, "Q2_K": 0.32,
}  # fmt: skip


def error(values: np.ndarray, type_name: str) -> float:
    kind = gguf.GGMLQuantizationType[type_name]
    stored = quantize(values, type_name)
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    assert stored.dtype == np.uint8 and stored.shape == (len(values), values.shape[1] // elements * size)
    difference = gguf.quants.dequantize(stored, kind) - values
    return float(np.linalg.norm(difference) / np.linalg.norm(values))


@pytest.fixture(params=["normal", "shifted", "tiny"])
def values(request) -> np.ndarray:
    normal = np.random.default_rng(0).standard_normal((64, 1024)).astype(np.float32)
    return {"normal": normal, "shifted": normal + np.float32(0.5), "tiny": normal * np.float32(0.002)}[request.param]


@pytest.mark.parametrize("type_name", BOUNDS)
def test_round_trip_stays_within_the_bound(values, type_name):
    assert error(values, type_name) < BOUNDS[type_name]


def test_more_bits_are_more_accurate(values):
    errors = [error(values, name) for name in ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K")]
    assert errors == sorted(errors)


@pytest.mark.parametrize("type_name", BOUNDS)
def test_zeros_and_single_values(type_name):
    values = np.zeros((3, 512), np.float32)
    assert not gguf.quants.dequantize(quantize(values, type_name), gguf.GGMLQuantizationType[type_name]).any()
    values[1, 300] = 0.75
    values[2, 7] = -0.75
    assert error(values, type_name) < 0.1


@pytest.mark.parametrize("type_name", ["Q4_K", "Q8_0"])
def test_strided_float64_input_is_the_same(type_name):
    values = np.random.default_rng(1).standard_normal((512, 8))
    assert np.array_equal(quantize(values.T, type_name), quantize(values.T.astype(np.float32).copy(), type_name))


@pytest.mark.parametrize(("type_name", "columns"), [("IQ2_XXS", 256), ("Q4_K", 128), ("Q8_0", 40), ("nothing", 256)])
def test_refusals(type_name, columns):
    with pytest.raises(QuantError, match="format_unsupported"):
        quantize(np.zeros((1, columns), np.float32), type_name)
