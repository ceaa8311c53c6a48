"""Noise to latents: diffusers' loop over the experts, of which one at a time holds memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ..blocks import require_finite
from ..memory.alarm import Alarm
from ..memory.plan import Plan
from ..memory.purge import empty_device_cache
from .decode import TiledVae
from .experts import Experts
from .loras import ModelPatches
from .opened import OpenTransformers
from .placement import Placement
from .request import Settings
from .resume import Progress
from .wan import make_pipeline


def denoise(
    transformers: OpenTransformers,
    settings: Settings,
    placement: Placement,
    plan: Plan,
    embeddings: torch.Tensor,
    vae: TiledVae,
    begin: Callable[[str], None],
    tell: Callable[[str], None],
    expand_timesteps: bool,
    patches: Sequence[ModelPatches] = (),
    progress: Progress | None = None,
    alarm: Alarm | None = None,
) -> torch.Tensor:
    """Run the pipeline's loop over both experts.

    Args:
        transformers: of the model, open.
        plan: of the run, which it keeps to.
        embeddings: (1 or 2, 512, text_dim): the prompt and, with guidance, the negative prompt.
        vae: encodes the image, where there is one, on the device; then goes to the CPU.
        begin: called with the name of each stage before it begins.
        tell: called with what a person wants to know meanwhile.
        patches: LoRAs, for each transformer in the order in which they run; empty for none.
        progress: told of each step; says which steps are done already.
        alarm: None for the usual one.
    Returns: latents (1, C, T, h, w) float32, normalised as the transformer sees them.
    Raises: WanFitError nan_in_latents. RunError memory_low.
    """

    def on_switch(name: str) -> None:
        nn.Module.to(vae, "cpu")
        empty_device_cache(placement.device)
        begin(f"denoise {name}".strip())

    def after_step(pipeline: Any, step: int, _: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        require_finite(
            tensors["latents"],
            f"the latents became NaN or infinite in step {step + 1} of {settings.steps}",
            dtype=placement.dtype,
            patched=bool(patches),
        )
        if progress is not None:
            tensors["latents"] = progress.after_step(tensors["latents"], pipeline.scheduler)
        return tensors

    experts = Experts(
        transformers,
        placement,
        plan,
        on_switch,
        lambda step: tell(f"memory is short, going on with less: {step}"),
        patches,
        alarm or Alarm(placement.device),
    )
    if experts.attention.measured:
        tell(f"attention: {experts.attention}")
    if progress is not None:
        for expert in experts.experts:
            expert.transformer.skip = lambda: progress.skipping
    try:
        pipeline = make_pipeline(settings, experts, vae, placement.device, expand_timesteps)
        inputs: dict[str, Any] = {"callback_on_step_end": after_step}
        if settings.image is not None:
            inputs["image"] = settings.image
        if settings.last_image is not None:
            inputs["last_image"] = settings.last_image
        if settings.boundary_ratio is not None:
            inputs["guidance_scale_2"] = settings.guidance_scale_2
        output: Any = pipeline(
            prompt_embeds=embeddings[:1],
            negative_prompt_embeds=embeddings[1:] if len(embeddings) == 2 else None,
            width=settings.width,
            height=settings.height,
            num_frames=settings.num_frames,
            num_inference_steps=settings.steps,
            guidance_scale=settings.guidance_scale,
            generator=torch.Generator("cpu").manual_seed(settings.seed),
            output_type="latent",
            **inputs,
        )
        return output.frames
    finally:
        notices = experts.notices
        experts.close()
        for notice in notices:
            tell(f"note: {notice}")
