"""The fused norm + SiLU of the VAE against the same in float32."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from wanfit.quant.triton_support import triton_refusal
from wanfit.vae.layers import Norm
from wanfit.vae.ops import norm_into

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("channels", [96, 192, 384, 1024])
@pytest.mark.parametrize("silu", [True, False])
def test_fused_norm(channels: int, silu: bool) -> None:
    """Rounded once, to bfloat16: 2^-8 of each value leaves half a unit in the last place for float32's own order."""
    if refusal := triton_refusal(CUDA):
        pytest.skip(refusal)
    from wanfit.vae.norm_triton import fits

    generator = torch.Generator(CUDA).manual_seed(0)
    window = torch.randn(1, 3, 19, 21, channels, device=CUDA, dtype=torch.bfloat16, generator=generator)
    x = window.permute(0, 4, 1, 2, 3)[..., 1:18, 2:19]
    prepared = torch.zeros(1, 5, 17, 17, channels, device=CUDA, dtype=torch.bfloat16).permute(0, 4, 1, 2, 3)
    out = prepared[:, :, 2:]
    gamma = torch.randn(channels, 1, 1, 1, device=CUDA, dtype=torch.bfloat16, generator=generator)
    assert fits(x, out)
    norm_into(x, Norm(SimpleNamespace(gamma=gamma, scale=channels**0.5), channels), out, silu=silu)
    expected = torch.empty(out.shape, device=CUDA)
    wide = Norm(SimpleNamespace(gamma=gamma.float(), scale=channels**0.5), channels)
    norm_into(x.float(), wide, expected, silu=silu)
    assert ((out.float() - expected).abs() <= 2**-8 * expected.abs() + 1e-6).all()
    assert not prepared[:, :, :2].any()
