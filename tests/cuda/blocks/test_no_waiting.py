"""A block's forward never makes the host wait for the device: the next block's kernels are queued behind it."""

from __future__ import annotations

import pytest
import torch
from wan_blocks import block_weights, shape_of, tiny_transformer

from wanfit.blocks import ForwardSettings, LowRank, block_forward
from wanfit.quant import StoredWeight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16
TOKENS = 96


def in_float8(weight: StoredWeight) -> StoredWeight:
    if len(weight.shape) != 2:
        return weight.to(DEVICE)
    value = weight.data.float()
    scale = value.abs().max() / 448
    return StoredWeight("f8_e4m3", weight.shape, (value / scale).to(torch.float8_e4m3fn), {"scale": scale}).to(DEVICE)


@pytest.mark.parametrize("float8", [None, False])
@pytest.mark.parametrize("lora", [False, True])
def test_nothing_waits(float8: bool | None, lora: bool):
    model = tiny_transformer(ffn_dim=704)
    shape = shape_of(model)
    weights = {name: in_float8(weight) for name, weight in block_weights(model.blocks[0]).items()}
    linears = {name.removesuffix(".weight"): w.shape for name, w in weights.items() if w.format == "f8_e4m3"}
    assert len(linears) == 10
    noise = torch.Generator(DEVICE).manual_seed(0)

    def draw(*size: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(size, generator=noise, device=DEVICE).to(dtype)

    adapters = {name: [LowRank(draw(16, size[1]), draw(size[0], 16), 0.5)] for name, size in linears.items()}
    given = {
        "context": draw(1, 512, shape.dim),
        "modulation": draw(1, 6, shape.dim),
        "rotary_emb": (draw(1, TOKENS, 1, shape.head_dim, dtype=torch.float32),) * 2,
        "settings": ForwardSettings(chunk_tokens=32, float8_matmul=float8),
        "adapters": adapters if lora else None,
    }
    with torch.inference_mode():
        hidden = draw(1, TOKENS, shape.dim, dtype=torch.float16)
        block_forward(hidden, weights, shape, **given)  # compiles, and makes what is made once
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            block_forward(hidden, weights, shape, **given)
        finally:
            torch.cuda.set_sync_debug_mode("default")
