"""diffusers' Wan pipelines, told where they compute and when guidance runs."""

from __future__ import annotations

from typing import Any, cast

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from diffusers.pipelines.wan.pipeline_wan_i2v import WanImageToVideoPipeline

from .experts import Experts
from .request import Settings
from .sampling import TRAIN_TIMESTEPS, make_scheduler


class _Placed:
    """What both pipelines need: an explicit device, and guidance decided for the expert that is running.

    diffusers looks at the high expert's scale alone, for both experts and the whole run.
    """

    wanfit_device: torch.device
    wanfit_settings: Settings

    @property
    def _execution_device(self) -> torch.device:
        return self.wanfit_device

    @property
    def do_classifier_free_guidance(self) -> bool:
        """Whether the negative prompt runs in the current step; before the first: in any step."""
        settings = self.wanfit_settings
        timestep = cast("torch.Tensor | None", getattr(self, "_current_timestep", None))
        if timestep is None or settings.boundary_ratio is None:
            return settings.uses_guidance
        high = float(timestep) >= settings.boundary_ratio * TRAIN_TIMESTEPS
        return (settings.guidance_scale if high else settings.guidance_scale_2) > 1


class TextToVideo(_Placed, WanPipeline):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`WanPipeline` of the lean transformers."""


class ImageToVideo(_Placed, WanImageToVideoPipeline):  # pyright: ignore[reportIncompatibleVariableOverride]
    """`WanImageToVideoPipeline` of the lean transformers."""


def make_pipeline(
    settings: Settings, experts: Experts, vae: AutoencoderKLWan, device: torch.device, expand_timesteps: bool
) -> TextToVideo | ImageToVideo:
    """The diffusers pipeline for these settings; text is encoded elsewhere, so it has no text encoder."""
    transformers = [expert.transformer for expert in experts.experts]
    parts: dict[str, Any] = {
        "tokenizer": None,
        "text_encoder": None,
        "vae": vae,
        "scheduler": make_scheduler(settings.sampler, settings.shift),
        "transformer": transformers[0],
        "transformer_2": transformers[1] if len(transformers) == 2 else None,
        "boundary_ratio": settings.boundary_ratio,
        "expand_timesteps": expand_timesteps,
    }
    pipeline = TextToVideo(**parts) if settings.image is None else ImageToVideo(**parts)
    pipeline.wanfit_device, pipeline.wanfit_settings = device, settings
    return pipeline
