"""The two Wan VAEs: diffusers configs and the statistics of their latents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..errors import InputError

VAE_VARIANTS = ("vae-2.1", "vae-2.2")

_TOPOLOGY: Mapping[str, Any] = {
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "attn_scales": [],
    "temperal_downsample": [False, True, True],
    "dropout": 0.0,
    "scale_factor_temporal": 4,
}

_MEAN_21 = (
    -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508,
    0.4134, -0.0715, 0.5517, -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
)  # fmt: skip
_STD_21 = (
    2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743,
    3.2687, 2.1526, 2.8652, 1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
)  # fmt: skip
_MEAN_22 = (
    -0.2289, -0.0052, -0.1323, -0.2339, -0.2799, 0.0174, 0.1838, 0.1557,
    -0.1382, 0.0542, 0.2813, 0.0891, 0.1570, -0.0098, 0.0375, -0.1825,
    -0.2246, -0.1207, -0.0698, 0.5109, 0.2665, -0.2108, -0.2158, 0.2502,
    -0.2055, -0.0322, 0.1109, 0.1567, -0.0729, 0.0899, -0.2799, -0.1230,
    -0.0313, -0.1649, 0.0117, 0.0723, -0.2839, -0.2083, -0.0520, 0.3748,
    0.0152, 0.1957, 0.1433, -0.2944, 0.3573, -0.0548, -0.1681, -0.0667,
)  # fmt: skip
_STD_22 = (
    0.4765, 1.0364, 0.4514, 1.1677, 0.5313, 0.4990, 0.4818, 0.5013,
    0.8158, 1.0344, 0.5894, 1.0901, 0.6885, 0.6165, 0.8454, 0.4978,
    0.5759, 0.3523, 0.7135, 0.6804, 0.5833, 1.4146, 0.8986, 0.5659,
    0.7069, 0.5338, 0.4889, 0.4917, 0.4069, 0.4999, 0.6866, 0.4093,
    0.5709, 0.6065, 0.6415, 0.4944, 0.5726, 1.2042, 0.5458, 1.6887,
    0.3971, 1.0600, 0.3943, 0.5537, 0.5444, 0.4089, 0.7468, 0.7744,
)  # fmt: skip
_STATISTICS: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {
    "vae-2.1": (_MEAN_21, _STD_21),
    "vae-2.2": (_MEAN_22, _STD_22),
}


def diffusers_config(variant: str, **overrides: Any) -> dict[str, Any]:
    """Arguments of diffusers' `AutoencoderKLWan` for one VAE; `overrides` replace single entries.

    Source: diffusers scripts/convert_wan_to_diffusers.py (`vae22_diffusers_config`), Apache-2.0.
    """
    mean, std = latent_statistics(variant)
    widths: Mapping[str, Any] = (
        {
            "base_dim": 96,
            "decoder_base_dim": None,
            "is_residual": False,
            "in_channels": 3,
            "out_channels": 3,
            "patch_size": None,
            "scale_factor_spatial": 8,
        }
        if variant == "vae-2.1"
        else {
            "base_dim": 160,
            "decoder_base_dim": 256,
            "is_residual": True,
            "in_channels": 12,
            "out_channels": 12,
            "patch_size": 2,
            "scale_factor_spatial": 16,
        }
    )
    return {
        **_TOPOLOGY,
        **widths,
        "z_dim": len(mean),
        "latents_mean": list(mean),
        "latents_std": list(std),
        **overrides,
    }


def latent_statistics(variant: str) -> tuple[Sequence[float], Sequence[float]]:
    """Mean and standard deviation of each latent channel: 16 for `vae-2.1`, 48 for `vae-2.2`."""
    if variant not in _STATISTICS:
        raise InputError(
            "number_invalid",
            "input",
            f"<vae_variant> is {variant!r}; known are {', '.join(VAE_VARIANTS)}",
            "Give one of these",
        )
    return _STATISTICS[variant]


def denormalize(latents: torch.Tensor, variant: str) -> torch.Tensor:
    """Latents of the transformer (B,C,T,h,w) as the VAE decodes them: latents * std + mean."""
    mean, std = _as_tensors(latents, variant)
    return latents * std + mean


def normalize(latents: torch.Tensor, variant: str) -> torch.Tensor:
    """Latents of the VAE (B,C,T,h,w) as the transformer sees them: (latents - mean) / std."""
    mean, std = _as_tensors(latents, variant)
    return (latents - mean) / std


def _as_tensors(latents: torch.Tensor, variant: str) -> tuple[torch.Tensor, torch.Tensor]:
    mean, std = latent_statistics(variant)
    if latents.ndim != 5 or latents.shape[1] != len(mean):
        raise InputError(
            "latent_invalid",
            "input",
            f"<latents> has shape {tuple(latents.shape)}; {variant} needs (B, {len(mean)}, T, h, w)",
            "Use the VAE that belongs to the transformer",
        )
    both = torch.tensor((mean, std), dtype=latents.dtype, device=latents.device).view(2, 1, -1, 1, 1, 1)
    return both[0], both[1]
