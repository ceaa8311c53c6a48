"""The lean forward against diffusers' own block and transformer, on the same weights."""

from __future__ import annotations

import pytest
import torch
from wan_blocks import (
    TEXT_TOKENS,
    block_weights,
    make_lean,
    relative_error,
    shape_of,
    tiny_transformer,
)

from wanfit.blocks import ForwardSettings, TokenModulation, block_forward

# float32: other matrix shapes round differently, 1e-7 a sum. bfloat16: 8 bits, a rounding is 2e-3 at the worst, and a block
# has about ten in a row; both sides are that far from the exact result.
BOUNDS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
CHUNKS = (1, 7, 64, 1000)
IMAGE = {"image_dim": 24, "added_kv_proj_dim": 256, "in_channels": 36}
KINDS: dict[str, dict[str, object]] = {
    "t2v": {},
    "i2v 2.2": {"in_channels": 36},
    "ti2v-5b": {"in_channels": 48, "out_channels": 48},
    "i2v 2.1": IMAGE,
    "flf2v": IMAGE | {"pos_embed_seq_len": 10},
}
GRID = (3, 5, 7)
TOKENS = 105
FRAME = 35


def modulation_inputs(kind: str, batch: int, dim: int, dtype: torch.dtype):
    """What diffusers gets, and the forms that the lean forward must take for it."""
    if kind != "ti2v-5b":
        rows = torch.randn(batch, 6, dim).to(dtype) / 4
        return rows, [rows]
    rows = torch.randn(batch, 2, 6, dim).to(dtype) / 4
    lengths = (FRAME, TOKENS - FRAME)
    per_token = rows.repeat_interleave(torch.tensor(lengths), dim=1)
    return per_token, [per_token, TokenModulation(rows, lengths)]


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_block_equals_diffusers_at_any_chunk_size(kind: str, batch: int, dtype: torch.dtype) -> None:
    model = tiny_transformer(dtype, **KINDS[kind])
    image_tokens = {"i2v 2.1": 5, "flf2v": 10}.get(kind, 0)
    shape = shape_of(model, image_tokens)
    hidden = torch.randn(batch, TOKENS, shape.dim).to(dtype)
    context = torch.randn(batch, image_tokens + TEXT_TOKENS, shape.dim).to(dtype)
    rotary = model.rope(torch.empty(batch, 16, GRID[0], 2 * GRID[1], 2 * GRID[2]))
    timestep, forms = modulation_inputs(kind, batch, shape.dim, dtype)
    expected = model.blocks[0](hidden, context, timestep, rotary)
    assert relative_error(hidden, expected) > 0.1, "the block must change its input for the test to say anything"

    for chunk in CHUNKS:
        for form in forms:
            actual = block_forward(
                own := hidden.clone(),
                block_weights(model.blocks[0]),
                shape,
                context=context,
                modulation=form,
                rotary_emb=rotary,
                settings=ForwardSettings(chunk),
            )
            assert actual is own
            assert actual.dtype == dtype
            error = relative_error(actual, expected)
            print(f"{kind} batch {batch} {dtype} chunk {chunk} {type(form).__name__}: {error:.2e}")
            assert error <= BOUNDS[dtype]


def model_inputs(kind: str, batch: int, dtype: torch.dtype, config) -> dict[str, torch.Tensor]:
    channels = config.in_channels
    inputs = {
        "hidden_states": torch.randn(batch, channels, GRID[0], 2 * GRID[1], 2 * GRID[2]).to(dtype),
        "timestep": torch.full((batch,), 937.0),
        "encoder_hidden_states": torch.randn(batch, TEXT_TOKENS, config.text_dim).to(dtype),
    }
    if kind == "ti2v-5b":
        inputs["timestep"] = torch.where(torch.arange(TOKENS) < FRAME, 0.0, 937.0).expand(batch, -1)
    if kind == "i2v 2.1":
        inputs["encoder_hidden_states_image"] = torch.randn(batch, 5, config.image_dim).to(dtype)
    if kind == "flf2v":  # first and last image of each sample, which diffusers joins to one sequence of 10
        inputs["encoder_hidden_states_image"] = torch.randn(2 * batch, 5, config.image_dim).to(dtype)
    return inputs


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_transformer_with_lean_blocks_equals_diffusers(kind: str, dtype: torch.dtype) -> None:
    model = tiny_transformer(dtype, **KINDS[kind])
    inputs = model_inputs(kind, 2, dtype, model.config)
    with torch.no_grad():
        expected = model(**inputs).sample
        source = make_lean(model, ForwardSettings(32), image_tokens=None)
        if "image_dim" not in KINDS[kind]:
            assert inputs["encoder_hidden_states"].shape[1] == TEXT_TOKENS, "so image_tokens=None means none"
        actual = model(**inputs).sample
    error = relative_error(actual, expected)
    print(f"{kind} {dtype}: {error:.2e}")
    assert [event for event, _ in source.log] == ["onload", "release"] * 2, "the lean blocks must have run"
    assert error <= BOUNDS[dtype]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)], ids=str)
def test_the_chunk_size_changes_rounding_only(dtype: torch.dtype, bound: float) -> None:
    """Matrix products of other heights may sum in another order: float32 1e-7 measured, bfloat16 2e-3."""
    model = tiny_transformer(dtype)
    shape = shape_of(model)
    hidden = torch.randn(1, TOKENS, shape.dim).to(dtype)
    context = torch.randn(1, TEXT_TOKENS, shape.dim).to(dtype)
    rotary = model.rope(torch.empty(1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2]))
    timestep = torch.randn(1, 6, shape.dim).to(dtype)

    def run(chunk: int) -> torch.Tensor:
        return block_forward(
            hidden.clone(),
            block_weights(model.blocks[0]),
            shape,
            context=context,
            modulation=timestep,
            rotary_emb=rotary,
            settings=ForwardSettings(chunk),
        )

    whole = run(TOKENS)
    assert torch.equal(whole, run(TOKENS)), "the same settings give the same bits"
    for chunk in (1, 2, 7, 32, 64, 104):
        actual = run(chunk)
        print(f"{dtype} chunk {chunk}: {relative_error(actual, whole):.2e}, same bits: {torch.equal(actual, whole)}")
        assert relative_error(actual, whole) <= bound


def test_float16_works() -> None:
    reference = tiny_transformer()
    shape = shape_of(reference)
    hidden = torch.randn(1, TOKENS, shape.dim)
    context = torch.randn(1, TEXT_TOKENS, shape.dim)
    rotary = reference.rope(torch.empty(1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2]))
    timestep = torch.randn(1, 6, shape.dim)
    weights = block_weights(reference.blocks[0])
    run = {"context": context, "modulation": timestep, "rotary_emb": rotary, "settings": ForwardSettings(16)}
    expected = block_forward(hidden.clone(), weights, shape, **run)
    actual = block_forward(hidden.half(), weights, shape, **(run | {"context": context.half()}))
    assert actual.dtype == torch.float16
    assert relative_error(actual, expected) <= 2e-3  # 11 bits: 5e-4 a rounding
