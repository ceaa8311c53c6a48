"""The VAE's part of a plan: which tiles fit beside what else is there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import BudgetError
from ..vae.job import TilePlan
from ..vae.plan import plan_decode, plan_encode
from .demand import LIBRARIES, Demand, Video, latents_bytes, vae_demand, vae_weights, video_to_encode
from .machine import Machine
from .parts import Model, VaePart
from .verdict import room_of

VAE_MARGIN = 0.9
"""Of what is left, for the VAE: its shapes vary, and the allocator's pool with them."""


def decode_shape(model: Model, video: Video) -> tuple[int, int, int, int, int]:
    """Latents (B, C, T, h, w) of the video."""
    step = video.size_multiple // 2
    channels = 16 if model.vae.variant == "vae-2.1" else 48
    return video.batch, channels, video.latent_frames, video.height // step, video.width // step


def tile_plan(model: Model, video: Video, machine: Machine, direction: str, room: int) -> TilePlan:
    """The VAE's plan within `room` bytes, which its weights and what it works on have to share.

    Raises: BudgetError: budget_exceeded.
    """
    vae, dtype, device = model.vae.module(), machine.vae_dtype, machine.device
    single = direction == "encode" and model.variant.expand_timesteps
    shape = decode_shape(model, video)
    held = latents_bytes(shape)
    if direction == "encode":
        held = video_to_encode(video, machine, single=single)
        shape = (1, 3, 1 if single else video.num_frames, video.height, video.width)
    if device == "cuda":
        held += LIBRARIES
    plan = plan_encode if direction == "encode" else plan_decode
    others = vae_weights(model.vae, machine) - _running(model.vae, direction, dtype, device)
    return plan(vae, shape, dtype=dtype, device=device, budget_bytes=room - held - others)


@functools.cache
def _running(part: VaePart, direction: str, dtype: torch.dtype, device: str) -> int:
    """Bytes of the half of the VAE that runs, which are what the VAE's own plans count."""
    plan = plan_encode if direction == "encode" else plan_decode
    vae = part.module()
    pixels, channels = 128, 16 if part.variant == "vae-2.1" else 48
    shape = (1, 3, 1, pixels, pixels) if direction == "encode" else (1, channels, 1, 8, 8)
    return plan(vae, shape, dtype=dtype, device=device, grid=(1, 1)).memory.weights


def plan_pass(
    vae: Any, shape: Sequence[int], direction: str, dtype: torch.dtype, device: torch.device, room: int
) -> TilePlan:
    """As `plan_encode` or `plan_decode`, with a budget that the VAE's weights are no part of.

    Args:
        room: bytes beside the whole VAE.
    """
    plan = plan_encode if direction == "encode" else plan_decode
    # The VAE's plans count the weights of the half that runs.
    running = plan(vae, shape, dtype=dtype, device=device, grid=(1, 1)).memory.weights
    return plan(vae, shape, dtype=dtype, device=device, budget_bytes=room + running)


def with_margin(plan: Callable[[int], TilePlan], room: int) -> tuple[TilePlan, bool]:
    """The plan within `VAE_MARGIN` of `room`, or within all of it; and whether it needs all of it.

    Raises: BudgetError: budget_exceeded.
    """
    try:
        return plan(int(room * VAE_MARGIN)), False
    except BudgetError:
        return plan(room), True


def vae_stages(model: Model, video: Video, machine: Machine) -> tuple[list[Demand], dict[str, BudgetError], str]:
    """Encode (where there is an image) and decode; what no grid of tiles fits; the stage that needs all there is."""
    passes = [("encode image", "encode")] if video.image else []
    passes.append(("decode and save", "decode"))
    demands: list[Demand] = []
    failures: dict[str, BudgetError] = {}
    squeezed = ""
    for name, direction in passes:

        def plan(room: int, direction: str = direction) -> TilePlan:
            return tile_plan(model, video, machine, direction, room)

        try:
            tiles, whole_room = with_margin(plan, room_of(machine))
        except BudgetError as error:
            failures[name] = error
            tiles, whole_room = plan(2**62), False
        squeezed = name if whole_room else squeezed
        demands.append(vae_demand(name, tiles, model.vae, video, machine))
    return demands, failures, squeezed
