"""Quantised blocks: the same bits as the float block over the dequantised weights, each weight read once."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Mapping

import gguf
import numpy as np
import pytest
import torch
from wan_blocks import TEXT_TOKENS, block_weights, shape_of, tiny_transformer

from wanfit.blocks import ForwardSettings, block_forward
from wanfit.errors import CheckpointError
from wanfit.quant import StoredWeight, dequantize

GRID = (3, 4, 5)
TOKENS = 60
KEEP_FLOAT = ("norm", "modulation", "bias")


def as_q8_0(weight: StoredWeight) -> StoredWeight:
    packed = gguf.quants.quantize(weight.data.numpy(), gguf.GGMLQuantizationType.Q8_0)
    return StoredWeight("q8_0", weight.shape, torch.from_numpy(np.ascontiguousarray(packed)))


def as_scaled_f8(weight: StoredWeight) -> StoredWeight:
    scale = weight.data.abs().max() / 448
    data = (weight.data / scale).to(torch.float8_e4m3fn)
    return StoredWeight("f8_e4m3", weight.shape, data, {"scale": scale})


class CountingWeights(Mapping[str, StoredWeight]):
    """Counts how often each weight is read."""

    def __init__(self, weights: Mapping[str, StoredWeight]) -> None:
        self.weights = weights
        self.reads: collections.Counter[str] = collections.Counter()

    def __getitem__(self, name: str) -> StoredWeight:
        self.reads[name] += 1
        return self.weights[name]

    def __contains__(self, name: object) -> bool:
        return name in self.weights

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


@pytest.fixture(scope="module")
def block():
    model = tiny_transformer()
    shape = shape_of(model)
    inputs = {
        "context": torch.randn(1, TEXT_TOKENS, shape.dim),
        "modulation": torch.randn(1, 6, shape.dim),
        "rotary_emb": model.rope(torch.empty(1, 16, GRID[0], 2 * GRID[1], 2 * GRID[2])),
        "settings": ForwardSettings(16),
    }
    return block_weights(model.blocks[0]), shape, torch.randn(1, TOKENS, shape.dim), inputs


@pytest.mark.parametrize("quantise", [as_q8_0, as_scaled_f8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_quantised_block_equals_the_block_of_its_dequantised_weights(block, quantise, dtype) -> None:
    weights, shape, hidden, inputs = block
    inputs = inputs | {"context": inputs["context"].to(dtype)}
    stored = {k: w if any(part in k for part in KEEP_FLOAT) else quantise(w) for k, w in weights.items()}
    assert sum(w.format not in ("f32", "bf16") for w in stored.values()) == 10
    in_float = {
        k: StoredWeight("f32" if dtype == torch.float32 else "bf16", w.shape, dequantize(w, dtype))
        if w.format not in ("f32", "bf16")
        else w
        for k, w in stored.items()
    }
    actual = block_forward(hidden.to(dtype, copy=True), stored, shape, **inputs)
    expected = block_forward(hidden.to(dtype, copy=True), in_float, shape, **inputs)
    unquantised = block_forward(hidden.to(dtype, copy=True), weights, shape, **inputs)
    assert torch.equal(actual, expected)
    assert not torch.equal(actual, unquantised), "the stored bytes must have been used"


def test_each_weight_is_read_once_and_left_as_it_was(block) -> None:
    weights, shape, hidden, inputs = block
    before = {k: w.data.clone() for k, w in weights.items()}
    counting = CountingWeights(weights)
    block_forward(hidden.clone(), counting, shape, **inputs)
    assert counting.reads == dict.fromkeys(weights, 1)
    assert all(torch.equal(before[k], w.data) for k, w in weights.items())


def test_inputs_other_than_hidden_states_are_left_as_they_were(block) -> None:
    weights, shape, hidden, inputs = block
    names = ("context", "modulation")
    before = [inputs[name].clone() for name in names]
    turns = [x.clone() for x in inputs["rotary_emb"]]
    block_forward(hidden.clone(), weights, shape, **inputs)
    assert all(torch.equal(inputs[name], x) for name, x in zip(names, before, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(inputs["rotary_emb"], turns, strict=True))


def test_a_missing_weight_is_named(block) -> None:
    weights, shape, hidden, inputs = block
    with pytest.raises(CheckpointError, match=r"tensors_missing.*cross_attn\.o\.bias"):
        block_forward(hidden.clone(), {k: w for k, w in weights.items() if k != "cross_attn.o.bias"}, shape, **inputs)
