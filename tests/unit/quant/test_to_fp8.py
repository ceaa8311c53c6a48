"""Quantising to scaled float8 on loading."""

from __future__ import annotations

import torch

from wanfit.quant import StoredWeight, dequantize
from wanfit.quant.to_fp8 import to_fp8


def test_error_is_that_of_three_mantissa_bits() -> None:
    values = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * 0.02
    stored = to_fp8(StoredWeight("f32", (64, 96), values))
    assert (stored.format, stored.nbytes) == ("f8_e4m3", 64 * 96 + 4)
    error = (dequantize(stored, torch.float32) - values).abs()
    # e4m3 rounds to 3 bits behind the leading one: half a step is 2**-4 of the value; below, one step of subnormals
    assert (error <= values.abs() * 2**-4 + float(stored.params["scale"]) * 2**-10).all()
    assert float(stored.params["scale"]) * 448 == values.abs().max()


def test_zeros_stay_zeros_and_fp8_stays_itself() -> None:
    stored = to_fp8(StoredWeight("bf16", (4, 4), torch.zeros(4, 4, dtype=torch.bfloat16)))
    assert not dequantize(stored, torch.float32).any()
    assert to_fp8(stored) is stored
