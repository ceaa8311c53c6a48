"""LoRAs on a GPU: streamed with their block and kept are equal to the last bit, and leave nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch
from block_patches import require_same, some_patches, with_other_strengths

from wanfit.blocks import BlockPatches, ForwardSettings, LowRank, block_forward
from wanfit.blocks import projection as rules
from wanfit.blocks.settings import BlockShape
from wanfit.offload import PatchStore
from wanfit.quant import StoredWeight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda", 0)
DTYPE = torch.bfloat16


@pytest.mark.parametrize("keep", [True, False])
def test_every_block_has_its_own_changes(keep: bool):
    patches = some_patches()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    store = PatchStore(patches, DEVICE, DTYPE, keep=keep)
    for factor in (1.0, 2.5):
        changed = with_other_strengths(patches, factor)
        assert store.take_strengths(changed)
        for _ in range(3):
            for index in range(6):
                with store.onload(index) as held:
                    require_same(held, changed.get(index, BlockPatches()), DTYPE)
                    tensors = [tensor for _, tensor, _ in held.tensors(DTYPE)]
                    assert all(tensor.device == DEVICE for tensor in tensors)
                    del held, tensors
    size = sum(block.nbytes(DTYPE) for block in patches.values())
    if keep:
        assert (store.device_bytes, store.host_bytes) == (size, 0)
    else:
        assert 0 < store.device_bytes < size <= store.host_bytes
    store.release_device()
    assert store.device_bytes == 0
    with store.onload(1) as held:
        require_same(held, changed[1], DTYPE)
        del held
    store.close()
    del store
    gc.collect()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize("float8", [True, False])
def test_added_beside_in_the_matrix_and_in_float8(float8: bool, monkeypatch: pytest.MonkeyPatch):
    """Against float32 on the same stored weights: a LoRA costs no more error than the product without it has."""
    dim, ffn, heads, tokens = 1024, 2816, 8, 4096
    generator = torch.Generator(DEVICE).manual_seed(3)

    def draw(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE) * scale

    shapes = {f"{part}_attn.{name}": (dim, dim) for part in ("self", "cross") for name in "qkvo"}
    shapes |= {"ffn.0": (ffn, dim), "ffn.2": (dim, ffn)}
    weights: dict[str, StoredWeight] = {}
    for name, (out, columns) in shapes.items():
        value = draw(out, columns, scale=columns**-0.5)
        scale = value.abs().max() / 448
        data = (value / scale).to(torch.float8_e4m3fn)
        weights[f"{name}.weight"] = StoredWeight("f8_e4m3", (out, columns), data, {"scale": scale})
        weights[f"{name}.bias"] = StoredWeight("bf16", (out,), draw(out, scale=0.02).bfloat16())
    for name in ("self_attn.norm_q", "self_attn.norm_k", "cross_attn.norm_q", "cross_attn.norm_k", "norm3"):
        weights[f"{name}.weight"] = StoredWeight("f32", (dim,), 1 + draw(dim, scale=0.1))
    weights["norm3.bias"] = StoredWeight("f32", (dim,), draw(dim, scale=0.1))
    weights["modulation"] = StoredWeight("f32", (1, 6, dim), draw(1, 6, dim, scale=0.1))
    adapters = {
        name: [LowRank(draw(64, columns, scale=columns**-0.5).bfloat16(), draw(out, 64, scale=0.1).bfloat16(), 0.5)]
        for name, (out, columns) in shapes.items()
    }
    angles = draw(1, tokens, 1, dim // heads)
    inputs = {
        "context": draw(1, 512, dim),
        "modulation": draw(1, 6, dim, scale=0.2),
        "rotary_emb": (angles.cos(), angles.sin()),
    }
    hidden = draw(1, tokens, dim)

    def forward(dtype: torch.dtype, loras: object, **options: object) -> torch.Tensor:
        given = {k: v.to(dtype) if k != "rotary_emb" else v for k, v in inputs.items()}
        settings = ForwardSettings(chunk_tokens=2048, **options)
        x = hidden.bfloat16().to(dtype)
        out = block_forward(x.clone(), weights, BlockShape(dim, heads, ffn), settings=settings, adapters=loras, **given)
        return out.float() - x.float()

    def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
        return float((actual - expected).norm() / expected.norm())

    with torch.inference_mode():
        options = {"float8_matmul": None if float8 else False}
        plain = forward(torch.float32, None, float8_matmul=False)
        reference = forward(torch.float32, adapters, float8_matmul=False)
        without = error(forward(DTYPE, None, **options), plain)
        auto = error(forward(DTYPE, adapters, **options), reference)
        monkeypatch.setattr(rules, "_merging_is_less", lambda matrix, rows: False)
        beside = error(forward(DTYPE, adapters, **options), reference)
    effect = error(plain, reference)
    print(f"float8 {float8}: effect {effect:.2f}, error without {without:.2e}, with {auto:.2e}, beside {beside:.2e}")
    assert effect > 0.1
    assert max(auto, beside) < 1.3 * without
