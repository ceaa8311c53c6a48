"""The forms of the forward that trade accuracy for speed or memory, on the CPU with the plain parts.

The GPU's kernels are held against these parts in tests/cuda/blocks.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from alloc_tracker import peak_bytes
from wan_blocks import TEXT_TOKENS, block_weights, relative_error, shape_of, tiny_transformer

from wanfit.blocks import ForwardSettings, LowRank, activation_bytes, block_forward
from wanfit.blocks.elementwise import PLAIN
from wanfit.blocks.heads import PackedHeads
from wanfit.quant import StoredWeight, dequantize
from wanfit.quant.float8_matmul import matmul, quantize_rows, takes_float8

GRID = (2, 3, 4)
TOKENS = 24  # two chunks
CONTEXT = 16
"""Text tokens, as ComfyUI gives them: PyTorch multiplies float8 on the CPU at 30 million products a second."""


def as_scaled_f8(weight: StoredWeight) -> StoredWeight:
    scale = weight.data.float().abs().max() / 448
    data = (weight.data.float() / scale).to(torch.float8_e4m3fn)
    return StoredWeight("f8_e4m3", weight.shape, data, {"scale": scale})


@pytest.fixture(scope="module")
def block():
    torch.manual_seed(0)
    model = tiny_transformer(torch.bfloat16, ffn_dim=256)
    weights = block_weights(model.blocks[0])
    stored = {name: as_scaled_f8(weight) if len(weight.shape) == 2 else weight for name, weight in weights.items()}
    shape = shape_of(model)
    inputs = {
        "context": torch.randn(1, CONTEXT, shape.dim).bfloat16(),
        "modulation": torch.randn(1, 6, shape.dim).bfloat16(),
        "rotary_emb": model.rope(torch.empty(1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2])),
    }
    return stored, shape, torch.randn(1, TOKENS, shape.dim).bfloat16(), inputs


def run(block, **options: object) -> torch.Tensor:
    stored, shape, hidden, inputs = block
    weights = options.pop("weights", stored)
    adapters = options.pop("adapters", None)
    settings = ForwardSettings(chunk_tokens=16, **options)
    return block_forward(hidden.clone(), weights, shape, settings=settings, adapters=adapters, **inputs)


def update_error(block, actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error of what the block adds to its input."""
    hidden = block[2]
    return relative_error(actual.float() - hidden.float(), expected.float() - hidden.float())


def test_rows_are_scaled_by_their_largest_value():
    x = torch.randn(3, 7, 64) * torch.logspace(-4, 4, 7).view(1, 7, 1)
    x[0, 0] = 0
    before = x.clone()
    rows = quantize_rows(x)
    assert torch.equal(x, before)
    assert torch.equal(rows.scale[1:], x.abs().amax(-1)[1:])
    back = rows.to(torch.float32)
    assert torch.isfinite(back).all()
    assert not back[0, 0].any()
    # 3 bits of mantissa: half a step is 1/16 of the value
    assert ((back - x).abs() <= x.abs() / 16 + rows.scale.unsqueeze(-1) * 2**-18).all()


def test_product_equals_float32_on_the_same_float8_numbers():
    torch.manual_seed(0)
    weight = as_scaled_f8(StoredWeight("f32", (48, 64), torch.randn(48, 64)))
    x = quantize_rows(torch.randn(2, 5, 64))
    actual = matmul(x, weight, torch.bfloat16).float() * x.scale.unsqueeze(-1)
    expected = x.to(torch.float32) @ dequantize(weight, torch.float32).t()
    assert relative_error(actual, expected) < 4e-3  # bfloat16's rounding


def test_what_the_file_forbids_or_the_units_cannot_is_not_multiplied_in_float8():
    weight = as_scaled_f8(StoredWeight("f32", (32, 64), torch.randn(32, 64)))
    assert takes_float8(weight)
    assert takes_float8(dataclasses.replace(weight, params={}))
    assert not takes_float8(dataclasses.replace(weight, options={"full_precision_matmul": True}))
    assert not takes_float8(dataclasses.replace(weight, params={"scale": torch.ones(32)}))
    assert not takes_float8(dataclasses.replace(weight, shape=(24, 64)))
    assert not takes_float8(StoredWeight("bf16", (32, 64), torch.zeros(32, 64, dtype=torch.bfloat16)))


def test_float8_block_is_near_the_block_over_dequantised_weights(block):
    expected = run(block, float8_matmul=False)
    actual = run(block, float8_matmul=True)
    error = update_error(block, actual, expected)
    assert 1e-3 < error < 6e-2  # not zero: the float8 path ran


def test_full_precision_markers_are_respected(block):
    marked = {
        name: dataclasses.replace(weight, options={"full_precision_matmul": True}) for name, weight in block[0].items()
    }
    assert torch.equal(run(block, weights=marked, float8_matmul=True), run(block, float8_matmul=False))


def test_linears_of_one_input_agree_on_how_they_read_it(block):
    mixed = dict(block[0])
    mixed["self_attn.q.weight"] = StoredWeight(
        "bf16", mixed["self_attn.q.weight"].shape, dequantize(mixed["self_attn.q.weight"], torch.bfloat16)
    )
    expected = run(block, float8_matmul=False)
    assert update_error(block, run(block, weights=mixed, float8_matmul=True), expected) < 6e-2


def test_no_float8_products_in_float32(block):
    stored, shape, hidden, inputs = block
    wide = {k: v.float() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
    results = [
        block_forward(
            hidden.float(), stored, shape, settings=ForwardSettings(chunk_tokens=16, float8_matmul=flag), **wide
        )
        for flag in (True, False)
    ]
    assert torch.equal(*results)


def test_adapters_work_beside_float8_products(block):
    dim = block[1].dim
    generator = torch.Generator().manual_seed(3)
    adapters = {
        name: [
            LowRank(
                torch.randn(4, dim, generator=generator) * 0.1,
                torch.randn(dim, 4, generator=generator) * 0.1,
                1.0,
            )
        ]
        for name in ("self_attn.q", "self_attn.o", "cross_attn.v")
    }
    without = run(block, float8_matmul=False)
    expected = run(block, float8_matmul=False, adapters=adapters)
    actual = run(block, float8_matmul=True, adapters=adapters)
    assert update_error(block, expected, without) > 0.1
    assert update_error(block, actual, expected) < 6e-2


def test_packed_heads_keep_each_vector_to_one_part_in_a_hundred():
    torch.manual_seed(0)
    like = torch.empty(2, 9, 256)
    heads = PackedHeads(like, like.dtype, 4, PLAIN)
    tokens = torch.randn(2, 9, 256) * torch.logspace(-3, 3, 9).view(1, 9, 1)
    for start, stop in ((0, 5), (5, 9)):
        room = heads.room(start, stop)
        room.copy_(tokens[:, start:stop])
        heads.commit(start, stop, room)
    back = torch.cat([heads.get(slice(0, 1)), heads.get(slice(1, 4))], dim=2)
    vectors = tokens.unflatten(2, (4, -1))
    error = (back - vectors).norm(dim=-1) / vectors.norm(dim=-1)
    assert error.max() < 1e-2
    assert torch.equal(heads.tokens(2, 7), back.flatten(2)[:, 2:7])


def test_packed_attention_is_near_the_plain_one(block):
    expected = run(block, float8_matmul=False)
    actual = run(block, float8_matmul=False, packed_attention=True)
    assert 1e-4 < update_error(block, actual, expected) < 1.5e-2


def test_packed_attention_saves_what_the_formula_says():
    model = tiny_transformer(torch.bfloat16, num_attention_heads=8, ffn_dim=2765, num_layers=1)
    shape = shape_of(model)
    tokens = 4096
    hidden = torch.randn(1, tokens, shape.dim).bfloat16()
    inputs = {
        "context": torch.randn(1, TEXT_TOKENS, shape.dim).bfloat16(),
        "modulation": torch.randn(1, 6, shape.dim).bfloat16(),
        "rotary_emb": model.rope(torch.empty(1, 16, 8, 32, 64)),
    }
    weights = block_weights(model.blocks[0])
    actual, planned = {}, {}
    for packed in (False, True):
        settings = ForwardSettings(chunk_tokens=256, packed_attention=packed)
        peak = peak_bytes(lambda: block_forward(hidden, weights, shape, settings=settings, **inputs))  # noqa: B023
        actual[packed] = hidden.nbytes + peak
        planned[packed] = activation_bytes(shape, settings, batch=1, tokens=tokens, itemsize=2)
        assert actual[packed] <= planned[packed]
    assert actual[False] - actual[True] > 0.8 * hidden.nbytes
