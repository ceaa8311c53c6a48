"""The fused element-wise kernels against the plain ones, and the float8 product against its own numbers."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from wanfit.blocks.elementwise import PLAIN, elementwise_for
from wanfit.blocks.product import LowRankTerm, Product
from wanfit.quant import StoredWeight
from wanfit.quant.float8_matmul import Float8Rows, float8_units, matmul, quantize_rows
from wanfit.quant.triton_support import triton_refusal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16
TOLERANCE = 6e-3
"""Relative error of one vector: each side rounds to bfloat16 (2e-3 rms) once or twice."""


@pytest.fixture
def fused():
    refusal = triton_refusal(DEVICE)
    if refusal:
        pytest.skip(refusal)
    return elementwise_for(DEVICE, DTYPE)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator(DEVICE).manual_seed(seed), device=DEVICE).to(dtype)


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.float() - expected.float()).norm() / expected.float().norm())


def product(dim: int, *, scaled: bool, seed: int) -> Product:
    data = noise(2, 5, dim, seed=seed)
    if not scaled:
        return Product(data)
    return Product(data, noise(2, 5, seed=seed + 1, dtype=torch.float32).abs(), noise(dim, seed=seed + 2))


def with_lora(dim: int, rank: int) -> Product:
    """The LoRA's product is a part of a wider one, as where linears share their input."""
    data, inner = noise(2, 5, dim, seed=3), noise(10, 3 * 208, seed=7)[:, 208 : 208 + rank]
    term = LowRankTerm(inner, noise(dim, rank, seed=8) * rank**-0.5)
    return Product(data, noise(2, 5, seed=4, dtype=torch.float32).abs(), noise(dim, seed=5), term)


def values(x: torch.Tensor | Float8Rows) -> torch.Tensor:
    return x.to(torch.float32) if isinstance(x, Float8Rows) else x.float()


@pytest.mark.parametrize("dim", [256, 1536, 5120])
@pytest.mark.parametrize("rows", [(1, 1), (2, 1), (2, 5)])
@pytest.mark.parametrize("quantize", [False, True])
def test_norm(fused, dim: int, rows: tuple[int, int], quantize: bool):
    if quantize and not float8_units(DEVICE):
        pytest.skip("no float8 units")
    x = noise(2, 9, dim)[:, 2:7]
    shift, scale = (noise(*rows, dim, seed=s, dtype=torch.float32) for s in (1, 2))
    actual, expected = (p.norm(x, shift, scale, 1e-6, dtype=DTYPE, quantize=quantize) for p in (fused, PLAIN))
    # float8 has 3 bits of mantissa: a value on the edge of two of them lands on either side
    assert relative(values(actual), values(expected)) < (2e-2 if quantize else TOLERANCE)


@pytest.mark.parametrize("low_rank", [False, True])
def test_a_residual_in_float16(fused, low_rank: bool):
    """Read and added to in its own dtype, beside a forward in bfloat16."""
    dim = 5120
    residual, gate = noise(2, 9, dim).half(), noise(1, 1, dim, dtype=torch.float32)
    normed, expected = (
        p.norm(residual, gate, gate, 1e-6, dtype=torch.bfloat16, quantize=False) for p in (fused, PLAIN)
    )
    assert normed.dtype == torch.bfloat16
    assert relative(values(normed), values(expected)) < TOLERANCE
    data = noise(2, 9, dim, dtype=torch.bfloat16)
    inner, up = noise(18, 64, dtype=torch.bfloat16), noise(dim, 64, dtype=torch.bfloat16)
    term = LowRankTerm(inner, up) if low_rank else None
    added = residual.clone()
    fused.add_gated(Product(data.clone(), low_rank=term), gate, added)
    value = data.double() + ((inner.double() @ up.double().t()).view_as(data) if low_rank else 0)
    reference = (residual.double() + value * gate.double()).half()
    assert added.dtype == torch.float16
    # float16 has 11 bits; the sum is rounded once
    assert relative(added, reference) < 1e-3


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("rotate", [False, True])
def test_rms_norm_rotate(fused, scaled: bool, rotate: bool):
    dim, heads = 5120, 40
    weight = noise(dim, seed=9)
    angles = torch.rand(1, 9, 1, 64, device=DEVICE).repeat_interleave(2, dim=-1)
    rotary = (angles.cos()[:, 2:7], angles.sin()[:, 2:7]) if rotate else None
    results = []
    for parts in (fused, PLAIN):
        out = torch.zeros(2, 9, dim, dtype=DTYPE, device=DEVICE)
        parts.rms_norm_rotate(product(dim, scaled=scaled, seed=3), weight, 1e-6, rotary, heads, out[:, 2:7])
        assert not out[:, :2].any() and not out[:, 7:].any()
        results.append(out)
    assert relative(*results) < 2 * TOLERANCE


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("dim", [704, 13824])
def test_gelu(fused, scaled: bool, dim: int):
    actual, expected = (values(p.gelu(product(dim, scaled=scaled, seed=4), quantize=False)) for p in (fused, PLAIN))
    assert relative(actual, expected) < 2 * TOLERANCE


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("gate", [None, (1, 1), (2, 5)])
def test_add_and_store(fused, scaled: bool, gate: tuple[int, int] | None):
    dim = 5120
    vectors = None if gate is None else noise(*gate, dim, seed=6, dtype=torch.float32)
    results = []
    for parts in (fused, PLAIN):
        residual = noise(2, 9, dim, seed=5)
        parts.add_gated(product(dim, scaled=scaled, seed=3), vectors, residual[:, 1:6])
        stored = torch.zeros(2, 9, dim, dtype=DTYPE, device=DEVICE)
        parts.store(product(dim, scaled=scaled, seed=3), stored[:, 4:])
        results.append(torch.cat([residual, stored]))
    assert relative(*results) < 2 * TOLERANCE


@pytest.mark.parametrize("rank", [16, 64, 208])
@pytest.mark.parametrize("gate", [None, (1, 1), (2, 1), (2, 5)])
def test_a_lora_is_added_by_what_reads_the_product(fused, rank: int, gate: tuple[int, int] | None):
    dim, heads = 5120, 40
    vectors = None if gate is None else noise(*gate, dim, seed=6, dtype=torch.float32)
    results = []
    for parts in (fused, PLAIN):
        residual = noise(2, 9, dim, seed=5)
        product = with_lora(dim, rank)
        given = product.data.clone()
        parts.add_gated(product, vectors, residual[:, 1:6])
        assert torch.equal(product.data, given) == (parts is fused), "the sum never goes through memory"
        stored, turned = (torch.zeros(2, 9, dim, dtype=DTYPE, device=DEVICE) for _ in range(2))
        parts.store(with_lora(dim, rank), stored[:, 4:])
        parts.rms_norm_rotate(with_lora(dim, rank), noise(dim, seed=9), 1e-6, None, heads, turned[:, 4:])
        results.append((residual, stored, turned, values(parts.gelu(with_lora(dim, rank), quantize=False))))
    assert relative(with_lora(dim, rank).value(), product_without_lora(dim)) > 0.5
    for actual, expected in zip(*results, strict=True):
        assert relative(actual, expected) < 2 * TOLERANCE


def product_without_lora(dim: int) -> torch.Tensor:
    return dataclasses.replace(with_lora(dim, 16), low_rank=None).value()


def test_quantised_rows_keep_each_row_s_largest_value(fused):
    if not float8_units(DEVICE):
        pytest.skip("no float8 units")
    x = noise(2, 9, 5120)[:, 2:7] * torch.logspace(-3, 3, 5, device=DEVICE).view(1, 5, 1).to(DTYPE)
    rows = fused.quantize(x)
    assert torch.equal(rows.scale, x.float().abs().amax(-1))
    assert relative(rows.to(torch.float32), x) < 3e-2
    assert relative(values(rows), values(quantize_rows(x))) < 2e-2


@pytest.mark.parametrize("rows", [1, 17, 4096])
def test_float8_product(rows: int):
    """Against float32 on the same float8 numbers: bfloat16 rounding, and the units' own accumulation."""
    if not float8_units(DEVICE):
        pytest.skip("no float8 units")
    weight = noise(640, 5120, dtype=torch.float32, seed=1)
    scale = weight.abs().max() / 448
    stored = StoredWeight("f8_e4m3", (640, 5120), (weight / scale).to(torch.float8_e4m3fn), {"scale": scale})
    x = quantize_rows(noise(1, rows, 5120))
    actual = matmul(x, stored, DTYPE).float() * x.scale.unsqueeze(-1)
    expected = x.to(torch.float32) @ (stored.data.float() * scale).t()
    assert relative(actual, expected) < 1e-2


@pytest.mark.parametrize("group", [slice(0, 40), slice(5, 7)])
def test_pack_and_unpack(fused, group: slice):
    x = noise(2, 9, 40 * 128).unflatten(2, (40, 128))[:, 2:7, group]
    results = []
    for parts in (fused, PLAIN):
        data = torch.zeros(2, 9, 40, 128, dtype=torch.int8, device=DEVICE)
        scale = torch.zeros(2, 9, 40, device=DEVICE)
        parts.pack(x, data[:, 2:7, group], scale[:, 2:7, group])
        back = parts.unpack(data[:, 2:7, group], scale[:, 2:7, group], DTYPE)
        assert relative(back, x) < 1e-2
        results.append((data, scale))
    # values half-way between two steps may go either way
    assert (results[0][0].int() - results[1][0].int()).abs().max() <= 1
    assert torch.allclose(results[0][1], results[1][1], rtol=1e-6)


def test_rows_are_read_and_written_16_bytes_at_a_time(fused):
    """As long as Triton knows that strides are multiples of 16; a load of one element each costs four times the time."""
    from wanfit.blocks import elementwise_kernels as kernels

    names = ("norm", "rms_rotate", "add", "gelu")
    for name in names:
        getattr(kernels, name).device_caches.clear()
    hidden = noise(1, 40, 5120)
    x, vectors = hidden[:, 16:32], noise(1, 1, 5120, dtype=torch.float32)
    data, angles = noise(1, 16, 5120), noise(1, 16, 1, 128, dtype=torch.float32)
    fused.norm(x, vectors, vectors, 1e-6, dtype=DTYPE, quantize=float8_units(DEVICE))
    fused.rms_norm_rotate(Product(data), noise(5120), 1e-6, (angles, angles), 40, x)
    fused.add_gated(Product(data), vectors, x)
    fused.gelu(Product(data), quantize=False)
    for name in names:
        (compiled,) = getattr(kernels, name).device_caches[0][0].values()
        text = compiled.asm["ptx"]
        assert "ld.global.v4.b32" in text and "st.global.v4.b32" in text, name
        assert not re.findall(r"(?:ld|st)\.global\.b16", text), name


def test_nothing_is_compiled_again_when_only_the_size_changes(fused):
    from wanfit.blocks import elementwise_kernels as kernels

    def run(batch: int, rows: int) -> None:
        hidden = torch.randn(batch, rows + 3, 512, device=DEVICE).to(DTYPE)
        vectors = torch.randn(1, 1, 512, device=DEVICE)
        x = hidden[:, 1 : rows + 1]
        quantize = float8_units(DEVICE)
        fused.norm(x, vectors, vectors, 1e-6, dtype=DTYPE, quantize=quantize)
        data = torch.randn(batch, rows, 512, device=DEVICE).to(DTYPE)
        angles = torch.randn(1, rows, 1, 128, device=DEVICE)
        fused.rms_norm_rotate(Product(data), data[0, 0], 1e-6, (angles, angles), 4, x)
        fused.add_gated(Product(data), vectors, x)
        fused.gelu(Product(data), quantize=quantize)
        packed = torch.zeros(batch, rows + 3, 4, 128, dtype=torch.int8, device=DEVICE)
        scale = torch.zeros(batch, rows + 3, 4, device=DEVICE)
        fused.pack(x.unflatten(2, (4, 128)), packed[:, 1 : rows + 1], scale[:, 1 : rows + 1])
        fused.unpack(packed[:, 1 : rows + 1], scale[:, 1 : rows + 1], DTYPE)

    def compiled() -> int:
        names = ("norm", "rms_rotate", "add", "gelu", "pack", "unpack")
        return sum(len(getattr(kernels, name).device_caches[0][0]) for name in names)

    run(2, 48)
    before = compiled()
    for rows in (1, 7, 16, 33, 4096):
        run(2, rows)
    assert compiled() == before
