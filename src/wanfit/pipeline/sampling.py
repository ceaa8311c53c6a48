"""Sigmas, schedulers and the step at which the low-noise expert takes over."""

from __future__ import annotations

import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_unipc_multistep import UniPCMultistepScheduler

TRAIN_TIMESTEPS = 1000
SAMPLERS = ("unipc", "euler")


def flow_sigmas(steps: int, shift: float) -> list[float]:
    """The noise levels of `steps` steps, highest (1.0) first, without the final 0: S·s / (1 + (S - 1)·s)."""
    points = [1 - index / steps for index in range(steps)]
    return [shift * point / (1 + (shift - 1) * point) for point in points]


class WanEulerScheduler(FlowMatchEulerDiscreteScheduler):
    """Euler over `flow_sigmas`: what 4-step LoRAs were distilled for.

    diffusers' class, given a shift, shifts an already shifted range a second time (4 steps at shift 5 give
    timesteps 1000, 910, 717, 24 instead of 1000, 937.5, 833.3, 625). Here the sigmas are given as they are.
    """

    wanfit_shift: float = 1.0

    def set_timesteps(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, num_inference_steps: int, device: str | torch.device = "cpu"
    ) -> None:
        """Set the timesteps of `num_inference_steps` steps at `wanfit_shift`."""
        super().set_timesteps(sigmas=flow_sigmas(num_inference_steps, self.wanfit_shift), device=device)


def make_scheduler(sampler: str, shift: float) -> UniPCMultistepScheduler | WanEulerScheduler:
    """A scheduler of diffusers set up for Wan. `sampler`: one of `SAMPLERS`."""
    if sampler == "euler":
        scheduler = WanEulerScheduler(num_train_timesteps=TRAIN_TIMESTEPS, shift=1.0)
        scheduler.wanfit_shift = shift
        return scheduler
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction",
        use_flow_sigmas=True,
        num_train_timesteps=TRAIN_TIMESTEPS,
        flow_shift=shift,
    )


def count_high_steps(sampler: str, steps: int, shift: float, boundary_ratio: float) -> int:
    """How many of `steps` the high-noise expert takes, from the timesteps that will really run."""
    scheduler = make_scheduler(sampler, shift)
    scheduler.set_timesteps(steps)
    return sum(float(t) >= boundary_ratio * TRAIN_TIMESTEPS for t in torch.as_tensor(scheduler.timesteps))
