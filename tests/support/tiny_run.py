"""A tiny model on disk and one denoising run over it, shared by the pipeline and command-line tests."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from wanfit.checkpoint import VARIANTS, open_checkpoint
from wanfit.memory.alarm import Alarm
from wanfit.memory.parts import Model, transformer_part, vae_part
from wanfit.memory.presets import text_preset
from wanfit.pipeline.denoise import denoise
from wanfit.pipeline.files import ModelFiles
from wanfit.pipeline.loras import LoraChoice, match_loras
from wanfit.pipeline.placement import Placement, choose_placement
from wanfit.pipeline.plan import plan_run
from wanfit.pipeline.request import Request, Settings, settle
from wanfit.pipeline.resume import Progress
from wanfit.pipeline.vae import load_vae

SIZE = {"width": 64, "height": 48, "num_frames": 5, "steps": 3}


def settings_for(files: ModelFiles, out: Path, **changes: Any) -> Settings:
    with open_checkpoint(files.high) as checkpoint:
        identity = checkpoint.identity
    return settle(Request(prompt="a boat", out=out, **(SIZE | changes)), identity, VARIANTS[identity.variant])


def placement_on_cpu(**changes: Any) -> Placement:
    return choose_placement("cpu", **changes)


def context(settings: Settings, text_dim: int = 4096, seed: int = 5) -> torch.Tensor:
    """Text embeddings as an encoder gives them: 512 places, zeros behind the prompt."""
    rows = 2 if settings.uses_guidance else 1
    embeddings = torch.zeros(rows, 512, text_dim)
    embeddings[:, :7] = torch.randn(rows, 7, text_dim, generator=torch.Generator().manual_seed(seed))
    return embeddings


def model_of(files: ModelFiles) -> Model:
    """Sizes of the parts; the text encoder, which these runs do without, is the usual one."""
    transformers = []
    for _, path in files.transformers:
        with open_checkpoint(path) as checkpoint:
            transformers.append(transformer_part(checkpoint))
    with open_checkpoint(files.vae) as checkpoint:
        return Model(tuple(transformers), text_preset(), vae_part(checkpoint))


def latents_of(
    files: ModelFiles,
    settings: Settings,
    placement: Placement,
    stages: list[str] | None = None,
    loras: Sequence[LoraChoice] = (),
    progress: Progress | None = None,
    alarm: Alarm | None = None,
) -> Any:
    """The latents of one run, on the CPU."""
    with ExitStack() as stack:
        opened = [(name, stack.enter_context(open_checkpoint(path))) for name, path in files.transformers]
        expand = VARIANTS[opened[0][1].identity.variant].expand_timesteps
        vae = load_vae(stack.enter_context(open_checkpoint(files.vae)), placement.vae_dtype)
        seen = stages if stages is not None else []
        patches = match_loras(loras, opened).patches
        plan = plan_run(model_of(files), settings, placement, patches)
        embeddings = context(settings)
        return denoise(
            opened, settings, placement, plan, embeddings, vae, seen.append, print, expand, patches, progress, alarm
        )


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    return float((value.double() - reference.double()).norm() / reference.double().norm())
