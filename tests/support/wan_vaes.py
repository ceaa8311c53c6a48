"""Small VAEs of the real topology with random weights, and the untiled reference."""

from __future__ import annotations

import itertools

import torch
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanResample
from torch import nn

from wanfit.vae.config import diffusers_config
from wanfit.vae.tile_plan import TilePlan

VARIANTS = ("vae-2.1", "vae-2.2")
Z = 4
GRIDS = tuple(itertools.product((1, 2, 3, 4), repeat=2))


def random_vae(variant: str, *, width: int = 8, seed: int = 0, dtype: torch.dtype = torch.float32) -> AutoencoderKLWan:
    torch.manual_seed(seed)
    widths = {"base_dim": width, "decoder_base_dim": width, "z_dim": Z}
    vae = AutoencoderKLWan(**diffusers_config(variant, **widths, latents_mean=[0.0] * Z, latents_std=[1.0] * Z))
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if "gamma" in name:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            if name.endswith("bias"):
                parameter.copy_(torch.randn_like(parameter) * 0.1)
            parameter.data = parameter.data.to(dtype)
    if dtype == torch.float64:  # diffusers upsamples in float32, which copies the numbers but rounds them
        for module in vae.decoder.modules():
            if isinstance(module, WanResample) and module.mode.startswith("upsample"):
                module.resample[0] = nn.Upsample(scale_factor=(2.0, 2.0), mode="nearest-exact")
    return vae.eval()


def factor(variant: str) -> int:
    """Pixels per latent position."""
    return 8 if variant == "vae-2.1" else 16


@torch.no_grad()
def untiled_decode(vae: AutoencoderKLWan, latents: torch.Tensor) -> torch.Tensor:
    return vae.decode(latents).sample


def cut_at_full_resolution(plan: TilePlan, size: tuple[int, int]) -> bool:
    """Whether, on each axis that the grid cuts, every tile's window at the finest stage is part of the frame."""
    index = -1 if plan.direction == "decode" else 0
    for tiles, positions in ((plan.rows, size[0]), (plan.columns, size[1])):
        windows = [tile.stages[index].window for tile in tiles]
        if len(tiles) > 1 and any(b - a >= positions for a, b in windows):
            return False
    return True
