"""Running out of memory: the hook before each step raises it as the allocator would."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from wan_vaes import Z, random_vae, untiled_decode

from wanfit.errors import BudgetError
from wanfit.vae import HostFrames, OrderedFrames, Step, decode, encode, plan_decode, plan_encode

VAE = random_vae("vae-2.1")
LATENTS = torch.randn(1, Z, 3, 8, 9)
EXPECTED = untiled_decode(VAE, LATENTS)


def out_of_memory_when(condition: Callable[[Step], bool], steps: list[Step]) -> Callable[[Step], None]:
    def before(step: Step) -> None:
        steps.append(step)
        if condition(step):
            raise torch.OutOfMemoryError("out of memory")

    return before


def test_unfinished_tiles_run_again_in_a_tighter_grid() -> None:
    plan = plan_decode(VAE, LATENTS.shape, dtype=torch.float32, grid=(1, 2))
    steps: list[Step] = []
    failed: list[Step] = []

    def once_in_the_second_tile(step: Step) -> bool:
        if step.tile == (0, 1) and step.frame > 0 and not failed:
            failed.append(step)
            return True
        return False

    sink = HostFrames()
    report = decode(VAE, LATENTS, plan, sink, before_step=out_of_memory_when(once_in_the_second_tile, steps))
    assert report.grids == [(1, 2), (2, 2)]
    assert report.tiles == 3
    again = [step.tile for step in steps[steps.index(failed[0]) + 1 :]]
    assert set(again) == {(0, 1), (1, 1)}
    assert (sink.video - EXPECTED).abs().max() <= 2e-6


def test_frames_already_handed_over_do_not_come_again() -> None:
    taken: list[int] = []
    video = torch.empty((*EXPECTED.shape[2:], 3))

    def consume(item: int, frame: int, pixels: torch.Tensor) -> None:
        taken.append(frame)
        video[frame].copy_(pixels)

    failed: list[int] = []

    def late_in_the_last_tile(step: Step) -> bool:
        if step.tile == (0, 1) and taken and not failed:
            failed.append(len(taken))
            return True
        return False

    sink = OrderedFrames(consume, torch.float32)
    plan = plan_decode(VAE, LATENTS.shape, dtype=torch.float32, grid=(1, 2), chunk=1)
    decode(VAE, LATENTS, plan, sink, before_step=out_of_memory_when(late_in_the_last_tile, []))
    sink.close()
    assert 0 < failed[0] < len(taken)
    assert taken == list(range(EXPECTED.shape[2]))
    assert (video.permute(3, 0, 1, 2) - EXPECTED[0]).abs().max() <= 5e-6  # chunk 1 adds up in another order


def test_nothing_tighter_left() -> None:
    plan = plan_decode(VAE, LATENTS.shape, dtype=torch.float32)
    with pytest.raises(BudgetError, match=r"budget_exceeded.*no tighter grid") as caught:
        decode(VAE, LATENTS, plan, HostFrames(), before_step=out_of_memory_when(lambda step: step.tile is not None, []))
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)


def test_whole_frame_part_tries_attention_in_pieces() -> None:
    latents = torch.randn(1, Z, 1, 24, 24)
    failures = iter((True, False))
    plan = plan_decode(VAE, latents.shape, dtype=torch.float32)
    sink = HostFrames()
    hook = out_of_memory_when(lambda step: step.tile is None and next(failures), [])
    decode(VAE, latents, plan, sink, before_step=hook)
    assert (sink.video - untiled_decode(VAE, latents)).abs().max() <= 2e-6


def test_encode_runs_again_too() -> None:
    video = torch.rand(1, 3, 5, 64, 128)
    with torch.no_grad():
        expected = VAE.encode(video).latent_dist.mean
    failures = iter([False, True] + [False] * 100)
    plan = plan_encode(VAE, video.shape, dtype=torch.float32)
    hook = out_of_memory_when(lambda step: step.tile is not None and next(failures), [])
    encoded = encode(VAE, video, plan, before_step=hook)
    assert encoded.report.grids == [(1, 1), (1, 2)]
    assert (encoded.mean - expected).abs().max() <= 2e-6


def test_other_errors_pass() -> None:
    class Cancelled(Exception):
        pass

    def cancel(step: Step) -> None:
        if step.tile is not None:
            raise Cancelled

    plan = plan_decode(VAE, LATENTS.shape, dtype=torch.float32)
    with pytest.raises(Cancelled):
        decode(VAE, LATENTS, plan, HostFrames(), before_step=cancel)
