"""linear, gather_rows' module and the buffers that hold the stored bytes."""

from __future__ import annotations

import copy

import accelerate
import numpy as np
import pytest
import torch
from torch import nn

from wanfit.quant import QuantEmbedding, QuantLinear, StoredWeight, bits, dequantize, gather_rows, int8, linear

KEYS = ["f32", "bf16", "f8_e4m3", "f8_e5m2", "int8", "q8_0", "q4_k", "iq4_xs"]


@pytest.fixture
def stored(gguf_bytes):
    """A (32, 512) weight of a format, with the scales it needs."""

    def make(key: str) -> StoredWeight:
        torch.manual_seed(0)
        value = torch.randn(32, 512) * 0.05
        scale = {"scale": torch.linspace(0.001, 0.002, 32)[:, None]}
        if key in ("f32", "bf16"):
            return StoredWeight(key, (32, 512), value.to({"f32": torch.float32, "bf16": torch.bfloat16}[key]))
        if key.startswith("f8"):
            data = value.to(torch.float8_e4m3fn if key == "f8_e4m3" else torch.float8_e5m2)
            return StoredWeight(key, (32, 512), data, {"scale": torch.tensor(0.37), "input_scale": torch.tensor(1.5)})
        if key == "int8":
            return StoredWeight(key, (32, 512), (value * 500).to(torch.int8), scale, {"convrot_groupsize": 256})
        blocks = 512 // 256 if key in ("q4_k", "iq4_xs") else 512 // 32
        data = torch.from_numpy(gguf_bytes(key, rows=32, blocks=blocks, extremes=False))
        return StoredWeight(key, (32, 512), data, options={"full_precision_matmul": True})

    return make


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_linear_is_the_product_with_the_dequantised_weight(stored, key, dtype):
    weight = stored(key)
    bias = StoredWeight("f16", (32,), torch.randn(32).half())
    x = torch.randn(2, 5, 512).to(dtype)
    result = linear(x, weight, bias)
    assert result.dtype == dtype
    expected = nn.functional.linear(x, dequantize(weight, torch.float32).to(dtype), bias.data.to(dtype))
    assert torch.equal(result, expected)
    assert torch.equal(linear(x, weight, bias.data), expected)
    assert torch.equal(linear(x, weight), nn.functional.linear(x, dequantize(weight, dtype)))


@pytest.mark.parametrize("key", KEYS)
def test_casting_the_module_leaves_the_stored_bytes(stored, key):
    weight = stored(key)
    module = QuantLinear(weight, torch.ones(32, dtype=torch.bfloat16))
    index = torch.tensor([[1, 31]])
    table = QuantEmbedding(weight, torch.bfloat16)
    x = torch.randn(3, 512)
    before, rows = module(x), table(index)
    for cast in (
        lambda m: m.to(torch.float16),
        lambda m: m.half(),
        lambda m: m.double(),
        lambda m: m.to("cpu", torch.bfloat16),
    ):
        both = cast(copy.deepcopy(module)), cast(copy.deepcopy(table))
        assert torch.equal(both[0](x), before) and torch.equal(both[1](index), rows)
        for kept in (both[0].weight, both[1].weight):
            assert kept.format == weight.format and kept.shape == weight.shape and kept.options == weight.options
            assert kept.data.dtype == weight.data.dtype
            assert torch.equal(kept.data.view(torch.uint8), weight.data.view(torch.uint8))
            assert kept.params.keys() == weight.params.keys()
            assert all(torch.equal(kept.params[role], weight.params[role]) for role in weight.params)


@pytest.mark.parametrize("key", KEYS)
def test_modules_take_the_room_of_the_file(stored, key):
    weight = stored(key)
    module = QuantLinear(weight)
    assert module.bias is None and not list(module.parameters())
    assert sum(t.numel() * t.element_size() for t in module.state_dict().values()) == weight.nbytes
    assert module.get_buffer("weight_data").data_ptr() == weight.data.data_ptr(), "no copy of the memory map"
    assert key in repr(module)


def test_state_dict_round_trip(stored):
    module, other = QuantLinear(stored("q4_k"), torch.zeros(32)), stored("q4_k")
    blank = QuantLinear(StoredWeight("q4_k", other.shape, torch.zeros_like(other.data)), torch.ones(32))
    blank.load_state_dict(module.state_dict())
    x = torch.randn(1, 512)
    assert torch.equal(blank(x), module(x))


def test_embedding(stored):
    weight = stored("q4_k")
    table = QuantEmbedding(weight, torch.float16)
    index = torch.randint(0, 32, (2, 7))
    result = table(index)
    assert result.dtype == torch.float16 and (table.num_embeddings, table.embedding_dim) == (32, 512)
    assert torch.equal(result, nn.functional.embedding(index, dequantize(weight, torch.float16)))
    with pytest.raises(IndexError):
        table(torch.tensor([32]))


class TwoLayers(nn.Module):
    def __init__(self, weight: StoredWeight) -> None:
        super().__init__()
        self.embedding = QuantEmbedding(weight, torch.bfloat16)
        self.norm = nn.LayerNorm(512, dtype=torch.bfloat16)
        self.out = QuantLinear(weight, torch.arange(32.0))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.embedding(index)))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "device",
    [
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def test_accelerate_cpu_offload(stored, key, device):
    model = TwoLayers(stored(key)).to(torch.bfloat16)
    index = torch.tensor([[0, 5, 9]])
    expected = model(index)
    offloaded = accelerate.cpu_offload(
        copy.deepcopy(model), execution_device=torch.device(device), offload_buffers=True
    )
    tensors = [*offloaded.parameters(), *offloaded.buffers()]
    assert all(t.device.type == "meta" for t in tensors), "accelerate has taken every tensor away"
    for _ in range(2):
        result = offloaded(index)
        # The same operations on the CPU; other matmul kernels on CUDA, in bfloat16 over 512 terms.
        tolerance = (
            {"rtol": 0, "atol": 0} if device == "cpu" else {"rtol": 0.02, "atol": 0.02 * float(expected.detach().std())}
        )
        torch.testing.assert_close(result.to("cpu"), expected, **tolerance)
        assert all(t.device.type == "meta" for t in tensors)
    assert np.isfinite(expected.float().detach().numpy()).all()


@pytest.mark.parametrize("key", ["iq4_xs", "int8"])
def test_tables_cached_in_inference_mode_serve_training(stored, key):
    bits._pair_table.cache_clear()
    int8._rotation.cache_clear()
    weight = stored(key)
    with torch.inference_mode():
        dequantize(weight, torch.float32)
    x = torch.randn(2, 512, requires_grad=True)
    linear(x, weight).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad[0], dequantize(weight, torch.float32).sum(0), atol=1e-4)


def test_rows_of_a_transposed_table():
    weight = StoredWeight("bf16", (8, 6), torch.randn(6, 8).bfloat16().T)
    index = torch.tensor([7, 0])
    assert torch.equal(gather_rows(weight, index, torch.float32), weight.data[index].float())
