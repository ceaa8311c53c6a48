"""LoRAs as a side path, against the same LoRAs merged into the weights."""

from __future__ import annotations

import dataclasses

import torch
from wan_blocks import TEXT_TOKENS, block_weights, relative_error, shape_of, tiny_transformer

from wanfit.blocks import ForwardSettings, LowRank, block_forward

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
