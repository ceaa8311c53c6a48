"""What a block's forward really allocates on the CPU, against the formula, and against diffusers."""

from __future__ import annotations

import pytest
import torch
from alloc_tracker import peak_bytes
from wan_blocks import TEXT_TOKENS, block_weights, shape_of, tiny_transformer

from wanfit.blocks import BlockShape, ForwardSettings, TokenModulation, activation_bytes, block_forward

GRID = (8, 16, 32)
TOKENS = 4096
DIM = 1024


@pytest.fixture(scope="module")
def model():
    """One block of 14B's proportions: feed-forward 2.7 times as wide as the model."""
    return tiny_transformer(torch.bfloat16, num_attention_heads=8, ffn_dim=2765, num_layers=1)


def inputs(model, batch: int = 1, frames: int = GRID[0]):
    hidden = torch.randn(batch, frames * 512, DIM).to(torch.bfloat16)
    context = torch.randn(batch, TEXT_TOKENS, DIM).to(torch.bfloat16)
    rotary = model.rope(torch.empty(batch, 16, frames, 2 * GRID[1], 2 * GRID[2]))
    rows = torch.randn(batch, 6, DIM).to(torch.bfloat16)
    return hidden, context, rows, rotary


def lean_peak(model, shape: BlockShape, settings: ForwardSettings, hidden, context, modulation, rotary) -> int:
    weights = block_weights(model.blocks[0])
    peak = peak_bytes(
        lambda: block_forward(
            hidden, weights, shape, context=context, modulation=modulation, rotary_emb=rotary, settings=settings
        )
    )
    return hidden.nbytes + peak


def test_four_tensors_and_one_chunk_where_diffusers_needs_eleven(model) -> None:
    hidden, context, rows, rotary = inputs(model)
    unit = hidden.nbytes
    with torch.no_grad():
        diffusers = unit + peak_bytes(lambda: model.blocks[0](hidden, context, rows, rotary))
    settings, shape = ForwardSettings(256), shape_of(model)
    lean = lean_peak(model, shape, settings, hidden, context, rows, rotary)
    planned = activation_bytes(shape, settings, batch=1, tokens=TOKENS, itemsize=2)
    print(
        f"peak in tokens x dim x 2 B: lean {lean / unit:.2f}, planned {planned / unit:.2f}, diffusers {diffusers / unit:.2f}"
    )
    one_chunk = 256 * 16 * DIM  # the normed input, a projection of it, and an RMS norm's three float32 copies
    assert lean <= 4.5 * unit + one_chunk
    assert lean < diffusers / 2


@pytest.mark.parametrize(
    ("batch", "frames", "chunk"), [(1, 8, 1024), (1, 8, 256), (1, 4, 33), (2, 4, 512), (1, 1, 4096), (1, 1, 64)]
)
def test_the_formula_bounds_what_is_allocated_and_is_near_it(model, batch: int, frames: int, chunk: int) -> None:
    hidden, context, rows, rotary = inputs(model, batch, frames)
    settings, shape = ForwardSettings(chunk), shape_of(model)
    planned = activation_bytes(shape, settings, batch=batch, tokens=hidden.shape[1], itemsize=2)
    actual = lean_peak(model, shape, settings, hidden, context, rows, rotary)
    print(f"batch {batch}, {hidden.shape[1]} tokens, chunk {chunk}: {actual / 2**20:.1f} of {planned / 2**20:.1f} MiB")
    assert actual <= planned
    if hidden.shape[1] > 2 * TEXT_TOKENS:  # below, the context's own keys and values are what peaks
        assert actual >= 0.9 * planned


def test_run_lengths_spare_the_per_token_modulation(model) -> None:
    hidden, context, _, rotary = inputs(model, frames=4)
    rows = torch.randn(1, 2, 6, DIM).to(torch.bfloat16)
    lengths = (512, 1536)
    settings, shape = ForwardSettings(256), shape_of(model)
    per_token = rows.repeat_interleave(torch.tensor(lengths), dim=1)
    with torch.no_grad():
        diffusers = peak_bytes(lambda: model.blocks[0](hidden, context, per_token, rotary)) + per_token.nbytes
    runs = lean_peak(model, shape, settings, hidden, context, TokenModulation(rows, lengths), rotary)
    dense = lean_peak(model, shape, settings, hidden, context, per_token, rotary) + per_token.nbytes
    unit = hidden.nbytes
    print(f"runs {runs / unit:.2f}, per token {dense / unit:.2f}, diffusers {diffusers / unit + 1:.2f}")
    assert runs <= activation_bytes(shape, settings, batch=1, tokens=2048, itemsize=2)
    assert runs < dense - 5 * unit
    assert dense < diffusers / 2


@pytest.mark.parametrize(("ffn_dim", "chunk"), [(5973, 1024), (5973, 64), (9000, 512)])
def test_the_formula_holds_in_float32_and_with_a_wide_feed_forward(ffn_dim: int, chunk: int) -> None:
    model = tiny_transformer(num_attention_heads=8, ffn_dim=ffn_dim, num_layers=1)
    hidden, context, rows, rotary = inputs(model, frames=2)
    settings, shape = ForwardSettings(chunk), shape_of(model)
    planned = activation_bytes(shape, settings, batch=1, tokens=1024, itemsize=4)
    actual = lean_peak(model, shape, settings, hidden.float(), context.float(), rows, rotary)
    print(f"ffn {ffn_dim}, chunk {chunk}: {actual / 2**20:.1f} of {planned / 2**20:.1f} MiB")
    assert 0.7 * planned <= actual <= planned
