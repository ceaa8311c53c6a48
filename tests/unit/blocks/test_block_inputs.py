"""Shapes that cannot work are refused before anything is changed; head groups; attention; modulation."""

from __future__ import annotations

import pytest
import torch
from wan_blocks import TEXT_TOKENS, block_weights, shape_of, tiny_transformer

from wanfit.blocks import BlockShape, ForwardSettings, TokenModulation, block_forward, sdpa
from wanfit.errors import InputError

GRID = (2, 3, 4)
TOKENS = 24


@pytest.fixture(scope="module")
def good():
    model = tiny_transformer()
    shape = shape_of(model)
    return {
        "hidden_states": torch.randn(1, TOKENS, shape.dim),
        "weights": block_weights(model.blocks[0]),
        "shape": shape,
        "context": torch.randn(1, TEXT_TOKENS, shape.dim),
        "modulation": torch.randn(1, 6, shape.dim),
        "rotary_emb": model.rope(torch.empty(1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2])),
        "settings": ForwardSettings(8),
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda g: {"hidden_states": torch.randn(1, TOKENS + 1, 256)},
        lambda g: {"hidden_states": torch.randn(1, TOKENS, 256).double()},
        lambda g: {"context": torch.randn(2, TEXT_TOKENS, 256)},
        lambda g: {"context": torch.randn(1, TEXT_TOKENS, 256).bfloat16()},
        lambda g: {"context": torch.randn(1, 5, 256), "shape": BlockShape(256, 2, 704, image_tokens=5)},
        lambda g: {"context": torch.randn(1, 500, 256), "shape": BlockShape(256, 2, 704, image_tokens=None)},
        lambda g: {"rotary_emb": tuple(x[:, 1:] for x in g["rotary_emb"])},
        lambda g: {"modulation": torch.randn(1, TOKENS - 1, 6, 256)},
        lambda g: {"modulation": torch.randn(1, 5, 256)},
        lambda g: {"modulation": TokenModulation(torch.randn(1, 2, 6, 256), (8, TOKENS))},
        lambda g: {"shape": BlockShape(512, 4, 704)},
    ],
)
def test_tensors_that_do_not_fit_are_refused_untouched(good, change) -> None:
    arguments = good | change(good)
    hidden = arguments.pop("hidden_states")
    before = hidden.clone()
    with pytest.raises(InputError, match="tensor_mismatch"):
        block_forward(hidden, arguments.pop("weights"), arguments.pop("shape"), **arguments)
    assert torch.equal(hidden, before)


def test_rows_and_run_lengths_must_agree() -> None:
    with pytest.raises(InputError, match="tensor_mismatch"):
        TokenModulation(torch.randn(1, 2, 6, 256), (24,))


@pytest.mark.parametrize("shape", [(256, 3, 704), (0, 1, 1), (256, 2, 0)])
def test_impossible_blocks_are_refused(shape: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="number_invalid"):
        BlockShape(*shape)


def test_runs_of_tokens_that_cross_chunks_equal_one_row_a_token(good) -> None:
    rows = torch.randn(1, 3, 6, 256)
    lengths = (5, 1, 18)
    arguments = {k: v for k, v in good.items() if k not in ("hidden_states", "weights", "shape", "modulation")}

    def run(modulation: torch.Tensor | TokenModulation) -> torch.Tensor:
        return block_forward(
            good["hidden_states"].clone(), good["weights"], good["shape"], modulation=modulation, **arguments
        )

    per_token = run(rows.repeat_interleave(torch.tensor(lengths), dim=1))
    assert torch.equal(run(TokenModulation(rows, lengths)), per_token)
    assert not torch.allclose(run(rows[:, 0]), per_token)


def test_without_image_tokens_a_block_with_image_weights_attends_to_the_text_alone() -> None:
    plain, with_image = tiny_transformer(), tiny_transformer(image_dim=24, added_kv_proj_dim=256)
    weights = block_weights(with_image.blocks[0])
    assert "cross_attn.k_img.weight" in weights
    rest = {k: w for k, w in weights.items() if "_img" not in k}
    rotary = plain.rope(torch.empty(1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2]))
    hidden, context = torch.randn(1, TOKENS, 256), torch.randn(1, TEXT_TOKENS, 256)
    results = [
        block_forward(
            hidden.clone(),
            w,
            shape_of(plain, image_tokens),
            context=context,
            modulation=torch.zeros(1, 6, 256),
            rotary_emb=rotary,
            settings=ForwardSettings(8),
        )
        for w, image_tokens in ((weights, 0), (weights, None), (rest, 0))
    ]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("heads", "chunk", "tokens", "expected"),
    [(40, 4096, 32760, 5), (40, 4096, 75600, 2), (40, 4096, 171360, 1), (40, 4096, 3000, 40), (12, 1, 99, 1)],
)
def test_an_attention_call_is_no_larger_than_a_chunk(heads: int, chunk: int, tokens: int, expected: int) -> None:
    shape = BlockShape(heads * 128, heads, heads * 300)
    assert ForwardSettings(chunk).heads_per_call(shape, tokens) == expected


def test_attention_over_strided_heads_equals_softmax() -> None:
    q, k, v = (torch.randn(2, n, 4, 128)[:, :, 1:3] for n in (9, 33, 33))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / 128**0.5
    expected = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)
    assert torch.allclose(sdpa(q, k, v), expected, atol=1e-5)
