"""Sigmas and the expert switch, against the closed form of the official code."""

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from wanfit.pipeline.sampling import count_high_steps, flow_sigmas, make_scheduler


def closed_form(steps: int, shift: float, boundary: float) -> int:
    return sum(shift * (1 - i / steps) / (1 + (shift - 1) * (1 - i / steps)) >= boundary for i in range(steps))


@pytest.mark.parametrize(
    ("steps", "shift", "boundary", "high"),
    [(40, 12, 0.875, 26), (40, 5, 0.9, 15), (20, 8, 0.9, 10), (20, 5, 0.9, 8), (4, 5, 0.9, 2), (8, 8, 0.875, 5)],
)
@pytest.mark.parametrize("sampler", ["unipc", "euler"])
def test_the_high_expert_takes_the_steps_of_the_official_boundary(sampler, steps, shift, boundary, high):
    assert count_high_steps(sampler, steps, shift, boundary) == high == closed_form(steps, shift, boundary)


def test_four_euler_steps_at_shift_5_are_those_the_lora_was_distilled_for():
    scheduler = make_scheduler("euler", 5.0)
    scheduler.set_timesteps(4)
    torch.testing.assert_close(scheduler.timesteps, torch.tensor([1000, 937.5, 2500 / 3, 625]), atol=1e-3, rtol=0)
    assert scheduler.sigmas.tolist() == pytest.approx([*flow_sigmas(4, 5.0), 0.0])
    theirs = FlowMatchEulerDiscreteScheduler(shift=5.0)
    theirs.set_timesteps(4)
    assert float(theirs.timesteps[-1]) < 30, "diffusers' own class still shifts twice; the override is needed"


def test_unipc_has_the_same_noise_levels_up_to_its_whole_numbers():
    scheduler = make_scheduler("unipc", 5.0)
    scheduler.set_timesteps(4)
    assert scheduler.timesteps.tolist() == [999, 937, 833, 625]
    # UniPC starts at 0.9999 instead of 1 and follows the same curve.
    assert scheduler.sigmas.tolist() == pytest.approx([*flow_sigmas(4, 5.0), 0.0], abs=1e-3)
