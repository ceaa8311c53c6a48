"""What the sampler node does: both experts in one run, each step by ComfyUI's own sampling."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import comfy.samplers
import torch
from comfy_extras.nodes_model_advanced import ModelSamplingSD3

import nodes as core

from ...src.wanfit.checkpoint import VARIANTS, check_pair
from ...src.wanfit.errors import InputError, WanFitError
from . import checks, purge
from .patcher import EnginePatcher
from .resume import Answers

SAMPLERS = list(comfy.samplers.KSampler.SAMPLERS)
SCHEDULERS = list(comfy.samplers.KSampler.SCHEDULERS)

_BOUNDARIES = {36: 0.9, 16: 0.875}
"""By the number of input channels: I2V and T2V."""


@dataclass(frozen=True)
class Schedule:
    """Which steps run, and on which expert.

    Args:
        sigmas: of all steps, with the last 0.
        first, last: steps [first, last) run; `switch` is the first one of the low-noise expert.
        computed: the switch that `boundary` gives; None without experts.
    """

    sigmas: torch.Tensor
    first: int
    last: int
    switch: int
    computed: int | None
    boundary: float | None

    def describe(self) -> str:
        """What runs, in a few lines."""
        if self.computed is None:
            return f"steps {self.first} to {self.last} of {len(self.sigmas) - 1}, one model"
        middle = min(max(self.switch, self.first), self.last)
        lines = [
            f"{len(self.sigmas) - 1} steps: high {self.first} to {middle}, low {middle} to {self.last}"
            f" (boundary {self.boundary:g}: noise {self._noise(self.switch - 1)} | {self._noise(self.switch)})"
        ]
        if self.switch != self.computed:
            lines.append(
                f"note: the switch at step {self.switch} was given; the boundary {self.boundary:g} is passed at step "
                f"{self.computed} with this schedule"
            )
        if middle in (self.first, self.last):
            lines.append("note: one expert takes every step; more steps or another boundary would use both")
        return "\n".join(lines)

    def _noise(self, step: int) -> str:
        return f"{float(self.sigmas[step]):.3f}" if 0 <= step < len(self.sigmas) else "-"


@dataclass(frozen=True)
class Settings:
    """The node's numbers and choices, by its input names."""

    seed: int
    steps: int
    cfg_high: float
    cfg_low: float
    sampler_name: str
    scheduler: str
    shift: float
    boundary: float
    switch_step: int
    start_at_step: int
    end_at_step: int
    add_noise: bool
    return_with_leftover_noise: bool


def sample(
    model_high: Any,
    model_low: Any | None,
    positive: Any,
    negative: Any,
    latent: dict[str, Any],
    settings: Settings,
    answers: Answers | None = None,
) -> tuple[dict[str, Any], str]:
    """The LATENT, and what ran.

    What two KSamplerAdvanced nodes with the same split give, to the last bit; the seed is the same for both.

    Raises:
        InputError: number_invalid, pair_mismatch, part_missing. WanFitError: nan_in_latents.
    """
    numbers = {name: getattr(settings, name) for name in ("cfg_high", "cfg_low", "shift")}
    checks.finite(numbers | {"boundary_ratio": settings.boundary})
    if isinstance(model_high, EnginePatcher) and isinstance(model_low, EnginePatcher):
        check_pair(model_high.runtime.checkpoint.identity, model_low.runtime.checkpoint.identity)
    if settings.shift > 0:
        model_high, model_low = (_shifted(model, settings.shift) for model in (model_high, model_low))
    schedule = plan(model_high, model_low, settings)
    text = schedule.describe()
    logging.info("WanFitSampler: %s", text)
    if answers is not None:
        text += answers.begin(model_high, model_low, positive, negative, latent, settings, schedule.switch)

    stages = [(model_high, settings.cfg_high, schedule.first, min(schedule.switch, schedule.last))]
    if model_low is not None:
        stages.append((model_low, settings.cfg_low, max(schedule.switch, schedule.first), schedule.last))
    stages = [stage for stage in stages if stage[2] < stage[3]]
    with nullcontext() if answers is None else answers:
        for number, (model, cfg, first, last) in enumerate(stages):
            if number:
                purge.release(stages[0][0], "this model")
            (latent,) = core.common_ksampler(
                model if answers is None else answers.over(model),
                settings.seed,
                settings.steps,
                cfg,
                settings.sampler_name,
                settings.scheduler,
                positive,
                negative,
                latent,
                disable_noise=bool(number) or not settings.add_noise,
                start_step=first,
                last_step=last,
                force_full_denoise=last == schedule.last and not settings.return_with_leftover_noise,
            )
            if not bool(torch.isfinite(latent["samples"]).all()):
                raise WanFitError(
                    "nan_in_latents",
                    "denoise",
                    f"the latents became NaN or infinite in steps {first} to {last}",
                    "Try another model file, another LoRA strength, or ComfyUI's --force-fp32",
                )
    return latent, text


def plan(model_high: Any, model_low: Any | None, settings: Settings) -> Schedule:
    """Find the switch from the sigmas that will really run.

    Raises: InputError: number_invalid, pair_mismatch, part_missing.
    """
    sigmas = _sigmas(model_high, settings)
    steps = len(sigmas) - 1
    first, last = settings.start_at_step, min(settings.end_at_step, steps)
    if first >= last:
        raise InputError(
            "number_invalid",
            "input",
            f"<start_at_step> {first} is not below <end_at_step> {settings.end_at_step} and the {steps} steps of this "
            "schedule: nothing would run",
            "Lower <start_at_step>",
        )
    if model_low is None:
        _check_single(model_high)
        return Schedule(sigmas, first, last, last, None, None)
    if settings.steps < 2:
        raise InputError(
            "number_invalid", "input", f"<steps> is {settings.steps}, and two experts need one each", "Use 2 or more"
        )
    if not torch.equal(sigmas, _sigmas(model_low, settings)):
        raise InputError(
            "pair_mismatch",
            "input",
            "<transformer> and <transformer_2> have different noise schedules (another shift was set on one of them)",
            "Set <shift> here, or give both the same ModelSamplingSD3",
        )
    boundary = settings.boundary or _boundary(model_high)
    computed = int((sigmas[:-1] >= boundary).sum())
    return Schedule(sigmas, first, last, settings.switch_step or computed, computed, boundary)


def _shifted(model: Any | None, shift: float) -> Any | None:
    return None if model is None else ModelSamplingSD3().patch(model, shift)[0]


def _sigmas(model: Any, settings: Settings) -> torch.Tensor:
    sampler = comfy.samplers.KSampler(
        model,
        steps=settings.steps,
        device=torch.device("cpu"),
        sampler=settings.sampler_name,
        scheduler=settings.scheduler,
        denoise=1.0,
        model_options=model.model_options,
    )
    return sampler.sigmas


def _boundary(model: Any) -> float:
    if isinstance(model, EnginePatcher):
        identity = model.runtime.checkpoint.identity
        official = VARIANTS[identity.variant].boundary_ratio
        channels = identity.in_channels
    else:
        official = None
        channels = model.model.model_config.unet_config.get("in_dim", 0)
    boundary = official or _BOUNDARIES.get(channels)
    if boundary is None:
        raise InputError(
            "number_invalid",
            "input",
            f"<boundary_ratio> is 0 (automatic), and a model with {channels} input channels has no official one",
            "Give <boundary_ratio>, or leave <transformer_2> unconnected",
        )
    return boundary


def _check_single(model: Any) -> None:
    if not isinstance(model, EnginePatcher):
        return
    identity = model.runtime.checkpoint.identity
    if VARIANTS[identity.variant].has_experts and identity.version_certain:
        raise InputError(
            "part_missing",
            "input",
            f"{model.runtime.checkpoint.path.name} is one of the two experts of {VARIANTS[identity.variant].title}, "
            "and <transformer_2> is not connected",
            "Connect the low-noise MODEL too",
        )
