"""What a graph gives to a sampler, checked against the model before any weight is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...src.wanfit.checkpoint import TITLES, VARIANTS, Identity
from ...src.wanfit.errors import InputError

_LATENT_CHANNELS = {16: "Wan 2.1", 48: "Wan 2.2"}


def check(identity: Identity, latent: torch.Tensor, conds: Mapping[str, Iterable[Mapping[str, Any]]]) -> None:
    """Refuse what ComfyUI's own model would ignore or fail on later.

    Args:
        latent: (B, C, T, h, w), as it goes to the sampler.
        conds: conditionings by name, as the guider holds them.

    Raises:
        InputError: latent_invalid, image_unexpected, pair_mismatch.
    """
    title = TITLES[identity.variant]
    if latent.ndim != 5 or latent.shape[1] != identity.out_channels or 0 in latent.shape:
        raise InputError(
            "latent_invalid",
            "denoise",
            f"<latent_image> has shape {tuple(latent.shape)} and {title} works on (batch, {identity.out_channels}, "
            "frames, height, width)",
            "Use EmptyHunyuanLatentVideo or WanImageToVideo for the 14B models, Wan22ImageToVideoLatent for TI2V-5B",
        )
    for name, entries in conds.items():
        for cond in entries:
            image = cond.get("concat_latent_image")
            if image is None:
                continue
            if not VARIANTS[identity.variant].takes_image or identity.in_channels == identity.out_channels:
                raise InputError(
                    "image_unexpected",
                    "denoise",
                    f"<{name}> carries an image from WanImageToVideo, and {title} would ignore it",
                    "Load the image-to-video (I2V) files, or leave WanImageToVideo out",
                )
            if image.shape[1] != identity.out_channels:
                vae = _LATENT_CHANNELS.get(image.shape[1], "another")
                raise InputError(
                    "pair_mismatch",
                    "denoise",
                    f"the image of <{name}> was encoded by the {vae} VAE: {image.shape[1]} channels instead of "
                    f"{identity.out_channels}",
                    "Connect wan_2.1_vae.safetensors to WanImageToVideo",
                )
