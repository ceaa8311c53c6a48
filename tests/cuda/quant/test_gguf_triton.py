"""The fused dequantisation against the plain one: every bit pattern of a block, odd numbers of blocks."""

from __future__ import annotations

import pytest
import torch

from wanfit.quant import StoredWeight, dequantize
from wanfit.quant.triton_support import fused_blocks, triton_refusal

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

BLOCKS = {"q8_0": (34, 32, (0,)), "q4_k": (144, 256, (0, 2)), "q5_k": (176, 256, (0, 2)), "q6_k": (210, 256, (208,))}


@pytest.mark.parametrize("rows", [1, 7, 130])
@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equals_the_plain_dequantiser(name: str, rows: int, dtype: torch.dtype):
    """float32: one rounding apart (a fused multiply-add rounds once less); 16 bit: one unit in the last place."""
    refusal = triton_refusal(torch.device("cuda", 0))
    if refusal:
        pytest.skip(refusal)
    nbytes, elements, halves = BLOCKS[name]
    columns = 3 * 256
    generator = torch.Generator().manual_seed(rows)
    data = torch.randint(0, 256, (rows, columns // elements * nbytes), generator=generator, dtype=torch.uint8)
    blocks = data.view(-1, nbytes)
    for at in halves:
        scale = (torch.rand(len(blocks), 1, generator=generator) - 0.5).mul_(0.01).half()
        blocks[:, at : at + 2] = scale.view(torch.uint8)
    expected = dequantize(StoredWeight(name, (rows, columns), data), torch.float32)
    fused = fused_blocks(data.cuda(), name, dtype)
    assert fused is not None
    actual = fused.cpu().float().view(rows, columns)
    unit = {torch.float32: 2e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    largest = expected.abs().max()
    assert (actual - expected).abs().max() <= unit * largest
