"""The tiled encode against diffusers' own untiled encode of the same VAE; tolerances as for decode."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLWan
from wan_vaes import VARIANTS, cut_at_full_resolution, factor, random_vae

from wanfit.vae import encode, plan_encode


@torch.no_grad()
def untiled(vae: AutoencoderKLWan, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    distribution = vae.encode(video).latent_dist
    return distribution.mean, distribution.logvar


@pytest.mark.parametrize("frames,height,width", [(1, 15, 17), (5, 17, 15)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_all_grids(variant: str, frames: int, height: int, width: int) -> None:
    vae = random_vae(variant)
    scale = factor(variant)
    video = torch.rand(1, 3, frames, height * scale, width * scale) * 2 - 1
    mean, logvar = untiled(vae, video)
    for grid in ((1, 4), (4, 1), (2, 3), (4, 4)) if frames == 1 else ((3, 3),):
        plan = plan_encode(vae, video.shape, dtype=torch.float32, grid=grid)
        assert cut_at_full_resolution(plan, (height * 8, width * 8))
        encoded = encode(vae, video, plan)
        assert encoded.report.tiles == grid[0] * grid[1]
        assert (encoded.mean - mean).abs().max() <= 1e-6
        assert (encoded.logvar - logvar).abs().max() <= 1e-6


@pytest.mark.parametrize("chunk,channels_last", [(1, False), (2, True), (4, False)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_however_it_is_run(variant: str, chunk: int, channels_last: bool) -> None:
    vae = random_vae(variant, dtype=torch.float64)
    scale = factor(variant)
    video = torch.rand(2, 3, 9, 5 * scale, 6 * scale, dtype=torch.float64) * 2 - 1
    mean, logvar = untiled(vae, video)
    plan = plan_encode(vae, video.shape, dtype=torch.float64, grid=(2, 2), chunk=chunk, channels_last=channels_last)
    encoded = encode(vae, video, plan)
    assert encoded.mean.dtype == torch.float64
    assert (encoded.mean - mean).abs().max() <= 1e-12
    assert (encoded.logvar - logvar).abs().max() <= 1e-12


def test_features_in_a_file_change_nothing() -> None:
    vae = random_vae("vae-2.1")
    video = torch.rand(1, 3, 5, 48, 64) * 2 - 1
    plan = plan_encode(vae, video.shape, dtype=torch.float32, grid=(2, 2))
    held, spooled = encode(vae, video, plan), encode(vae, video, plan, host_bytes=0)
    assert held.report.spooled_bytes == 0 and spooled.report.spooled_bytes == plan.feature_bytes
    assert torch.equal(held.mean, spooled.mean)
