"""LoRAs beside a linear and added into its dequantised matrix, against the same LoRAs merged into the weights."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from wan_blocks import TEXT_TOKENS, block_weights, relative_error, shape_of, tiny_transformer

from wanfit.blocks import ForwardSettings, LowRank, block_forward
from wanfit.blocks.float8_adapter import in_float8
from wanfit.blocks.product import Product
from wanfit.blocks.projection import BlockWeights
from wanfit.quant import StoredWeight, dequantize
from wanfit.quant.float8_matmul import quantize_rows

LINEARS = [f"{part}.{name}" for part in ("self_attn", "cross_attn") for name in "qkvo"] + ["ffn.0", "ffn.2"]


def test_side_path_equals_merged_weights() -> None:
    model = tiny_transformer()
    shape, weights = shape_of(model), block_weights(model.blocks[0])
    adapters, merged = {}, dict(weights)
    for number, name in enumerate(LINEARS):
        stored = weights[f"{name}.weight"]
        rank = 3 + number
        low = LowRank(torch.randn(rank, stored.shape[1]), torch.randn(stored.shape[0], rank), 0.05)
        second = LowRank(torch.randn(1, stored.shape[1]), torch.randn(stored.shape[0], 1), -0.1)
        adapters[name] = [low, second]
        delta = sum(a.scale * (a.up @ a.down) for a in adapters[name])
        merged[f"{name}.weight"] = dataclasses.replace(stored, data=stored.data + delta)
    inputs = {
        "context": torch.randn(2, TEXT_TOKENS, shape.dim),
        "modulation": torch.randn(2, 6, shape.dim) / 4,
        "rotary_emb": model.rope(torch.empty(2, 16, 2, 6, 10)),
        "settings": ForwardSettings(chunk_tokens=7),
    }
    hidden = torch.randn(2, 30, shape.dim)
    plain = block_forward(hidden.clone(), weights, shape, **inputs)
    expected = block_forward(hidden.clone(), merged, shape, **inputs)
    actual = block_forward(hidden.clone(), weights, shape, **inputs, adapters=adapters)
    assert relative_error(plain, expected) > 0.1
    assert relative_error(actual, expected) < 1e-5  # float32: another order of the same sums


@pytest.fixture(params=["f32", "bf16", "f8_e4m3"])
def linear(request: pytest.FixtureRequest) -> dict[str, StoredWeight]:
    """40 -> 56 features: adding into the matrix is less work from 24 rows on."""
    torch.manual_seed(0)
    value = torch.randn(56, 40) / 6
    stored = {
        "f32": lambda: StoredWeight("f32", (56, 40), value),
        "bf16": lambda: StoredWeight("bf16", (56, 40), value.bfloat16()),
        "f8_e4m3": lambda: StoredWeight(
            "f8_e4m3", (56, 40), (value * 100).to(torch.float8_e4m3fn), {"scale": torch.tensor(0.01)}
        ),
    }[request.param]()
    return {"a.weight": stored, "a.bias": StoredWeight("f32", (56,), torch.randn(56))}


@pytest.mark.parametrize(("rows", "merged"), [(23, False), (24, True), (500, True)])
def test_added_where_that_is_less_work_and_the_stored_weight_stays(linear, rows: int, merged: bool):
    pairs = [LowRank(torch.randn(r, 40), torch.randn(56, r), scale) for r, scale in ((4, 0.1), (1, -0.2))]
    before = linear["a.weight"].data.clone()
    x = torch.randn(rows, 40)
    (to_a,) = BlockWeights(linear, torch.float32, {"a": pairs}, rows=rows).projections("a")
    assert to_a.adapters == (() if merged else pairs)
    weight = dequantize(linear["a.weight"], torch.float64) + sum(
        p.scale * (p.up.double() @ p.down.double()) for p in pairs
    )
    expected = x.double() @ weight.t() + linear["a.bias"].data.double()
    assert relative_error(to_a(x).value().double(), expected) < 1e-6
    same = linear["a.weight"].data.view(torch.uint8)
    assert torch.equal(same, before.view(torch.uint8))
    assert to_a.weight.data_ptr() != linear["a.weight"].data.data_ptr() or not merged


def test_two_pairs_in_bfloat16_are_as_exact_in_the_matrix_as_beside_it(linear):
    pairs = [LowRank(torch.randn(r, 40).bfloat16(), torch.randn(56, r).bfloat16(), 0.1) for r in (8, 3)]
    x = torch.randn(64, 40).bfloat16()
    weight = dequantize(linear["a.weight"], torch.float64) + sum(
        p.scale * (p.up.double() @ p.down.double()) for p in pairs
    )
    expected = x.double() @ weight.t() + linear["a.bias"].data.double()
    for rows in (1, 64):
        (to_a,) = BlockWeights(linear, torch.bfloat16, {"a": pairs}, rows=rows).projections("a")
        assert relative_error(to_a(x).value().double(), expected) < 6e-3  # a few roundings of 2**-9


@pytest.mark.parametrize("merged", [True, False])
def test_beside_the_rows_and_in_the_matrix_are_the_same(monkeypatch: pytest.MonkeyPatch, merged: bool) -> None:
    """The stored matrix stays as it is either way."""
    calls: list[bool] = []
    merge = LowRank.merged_into

    def counted(self: LowRank, matrix: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        calls.append(in_place)
        return merge(self, matrix, in_place=in_place)

    monkeypatch.setattr(LowRank, "merged_into", counted)
    weight, bias = torch.randn(24, 40), torch.randn(24)
    stored = {"a.weight": StoredWeight("f32", (24, 40), weight), "a.bias": StoredWeight("f32", (24,), bias)}
    pairs = [
        LowRank(torch.randn(3, 40), torch.randn(24, 3), 0.5),
        LowRank(torch.randn(1, 40), torch.randn(24, 1), -2.0),
    ]
    rows = 1000 if merged else 4
    before = weight.clone()
    (linear,) = BlockWeights(stored, torch.float32, {"a": pairs}, rows=rows).projections("a")
    assert calls == ([False, True] if merged else []), "the file's own tensor is never written to"
    assert torch.equal(weight, before)
    x = torch.randn(1, rows, 40)
    expected = x @ (weight + sum(p.scale * p.up @ p.down for p in pairs)).T + bias
    assert relative_error(linear(x).value(), expected) < 1e-6


@pytest.mark.parametrize("ranks", [((16,),), ((5, 20), (), (16,)), ((), (1,))])
def test_float8_linears_read_their_loras_in_float8(ranks: tuple[tuple[int, ...], ...], monkeypatch) -> None:
    """Any rank; several in one linear, several linears of one input: one product for all their `down`.

    The error is that of the float8 product itself (3.5e-2 measured).
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 30, 512, generator=generator).bfloat16()
    linears = [
        [
            LowRank(
                torch.randn(rank, 512, generator=generator) * 0.1, torch.randn(256, rank, generator=generator), scale
            )
            for rank, scale in zip(some, (0.5, -2.0), strict=False)
        ]
        for some in ranks
    ]
    products: list[int] = []
    scaled_mm = torch._scaled_mm

    def counted(a: torch.Tensor, b: torch.Tensor, **options: object) -> torch.Tensor:
        products.append(b.shape[1])
        return scaled_mm(a, b, **options)

    monkeypatch.setattr(torch, "_scaled_mm", counted)
    rows = quantize_rows(x)
    loras = in_float8(linears, torch.bfloat16)
    for adapters, lora in zip(linears, loras, strict=True):
        assert (lora is None) == (not adapters)
        if lora is None:
            continue
        result = torch.zeros(2, 30, 256, dtype=torch.bfloat16)
        Product(result, low_rank=lora.term(rows)).value()
        expected = sum(a.scale * x.float() @ a.down.T @ a.up.T for a in adapters)
        assert relative_error(result.float() * rows.scale.unsqueeze(-1), expected) < 5e-2
    assert products == [sum(-(-sum(some) // 16) * 16 for some in ranks)], "one product for all"
