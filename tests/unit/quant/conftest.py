"""Hostile GGUF blocks: random bytes with the float16 fields set to chosen values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

# Byte offsets of the float16 fields of each type.
HALVES = {
    "q8_0": (0,), "q5_1": (0, 2), "q5_0": (0,), "q4_1": (0, 2), "q4_0": (0,),
    "q6_k": (208,), "q5_k": (0, 2), "q4_k": (0, 2), "q3_k": (108,), "q2_k": (80, 82),
    "iq4_xs": (0,), "iq4_nl": (0,),
}  # fmt: skip
# Both zeros, the smallest and largest subnormal, the smallest normal, ones, the largest, with both signs.
EXTREMES = np.array([0x0000, 0x8000, 0x0001, 0x8001, 0x03FF, 0x83FF, 0x0400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF], np.uint16)


@pytest.fixture(params=sorted(HALVES))
def gguf_key(request) -> str:
    return request.param


@pytest.fixture
def gguf_bytes():
    """rows, blocks a row, scale values -> uint8 (rows, row_bytes) of a type."""

    def make(key: str, rows: int = 22, blocks: int = 3, *, extremes: bool = True, seed: int = 0) -> np.ndarray:
        rng = np.random.default_rng(seed)
        _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[key.upper()]]
        data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
        for at in HALVES[key]:
            scale = (rng.standard_normal((rows, blocks)) * 1e-3).astype(np.float16).view(np.uint16)
            if extremes:
                scale[:, 0] = rng.permutation(np.resize(EXTREMES, rows))
            data[..., at : at + 2] = scale[..., None].view(np.uint8)
        return data.reshape(rows, -1)

    return make


@pytest.fixture
def gguf_reference():
    """float32 values by gguf-py, itself independent of torch."""

    def read(key: str, data: np.ndarray) -> np.ndarray:
        return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[key.upper()])

    return read
