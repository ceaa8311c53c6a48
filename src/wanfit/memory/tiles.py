"""The VAE's part of a plan: which tiles fit beside what else is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import BudgetError
from ..vae.adapters import describe
from ..vae.plan import plan_decode, plan_encode
from ..vae.tile_plan import TilePlan
from .demand import LIBRARIES, Demand, Video, latents_bytes, saving_causes, vae_demand, vae_weights, video_to_encode
from .machine import Machine
from .parts import Model
from .verdict import room_of, within

VAE_MARGIN = 0.9
"""Of what is left, for the VAE: its shapes vary, and the allocator's pool with them."""


def decode_shape(model: Model, video: Video) -> tuple[int, int, int, int, int]:
    """Latents (B, C, T, h, w) of the video."""
    step = video.size_multiple // 2
    return video.batch, model.vae.latent_channels, video.latent_frames, video.height // step, video.width // step


def tile_plan(
    model: Model, video: Video, machine: Machine, direction: str, room: int, *, or_least: bool = False
) -> TilePlan:
    """The VAE's plan within `room` bytes, which its weights and what it works on have to share.

    Raises: BudgetError: budget_exceeded; with `or_least` the plan of least memory comes instead.
    """
    vae, dtype, device = model.vae.description, machine.vae_dtype, machine.device
    single = direction == "encode" and model.variant.expand_timesteps
    shape = decode_shape(model, video)
    held = latents_bytes(shape)
    if direction == "encode":
        held = video_to_encode(video, machine, single=single)
        shape = (1, 3, 1 if single else video.num_frames, video.height, video.width)
    if device == "cuda":
        held += LIBRARIES
    plan = plan_encode if direction == "encode" else plan_decode
    others = vae_weights(model.vae, machine) - vae.elements(direction) * dtype.itemsize

    def within(room: int) -> TilePlan:
        return plan(vae, shape, dtype=dtype, device=device, budget_bytes=room, or_least=or_least)

    left = room - held - others
    if device == "cpu" and direction == "decode":
        return beside_saving(within, video.width, video.height, video.num_frames)(left)
    return within(left)


def beside_saving(
    plan: Callable[[int], TilePlan], width: int, height: int, num_frames: int
) -> Callable[[int], TilePlan]:
    """`plan` of a decode on the CPU, within what saving the frames leaves of the room: more for the whole frame than
    for tiles, whose frames wait for each other."""

    def within(room: int) -> TilePlan:
        def left(tiles: int) -> int:
            return room - sum(saving_causes(width, height, num_frames, tiles).values())

        found = plan(left(1))
        return found if found.tiles == 1 else plan(left(found.tiles))

    return within


def plan_pass(
    vae: Any, shape: Sequence[int], direction: str, dtype: torch.dtype, device: torch.device, room: int
) -> TilePlan:
    """As `plan_encode` or `plan_decode`, with a budget that the VAE's weights are no part of.

    Args:
        room: bytes beside the whole VAE.
    """
    plan = plan_encode if direction == "encode" else plan_decode
    # The VAE's plans count the weights of the half that runs.
    running = describe(vae).elements(direction) * dtype.itemsize
    return plan(vae, shape, dtype=dtype, device=device, budget_bytes=room + running)


def with_margin(plan: Callable[[int], TilePlan], room: int) -> tuple[TilePlan, bool]:
    """The plan within `VAE_MARGIN` of `room`, or within all of it; and whether it needs all of it.

    Raises: BudgetError: budget_exceeded.
    """
    try:
        return plan(int(room * VAE_MARGIN)), False
    except BudgetError:
        return plan(room), True


def vae_fits(model: Model, machine: Machine, video: Video) -> bool:
    """Whether the VAE's passes fit in the smallest tiles."""
    for name, direction in _passes(video):
        tiles = tile_plan(model, video, machine, direction, 0, or_least=True)
        if not within(vae_demand(name, tiles, model.vae, video, machine), machine):
            return False
    return True


def _passes(video: Video) -> list[tuple[str, str]]:
    encode = [("encode image", "encode")] if video.image else []
    return [*encode, ("decode and save", "decode")]


def vae_stages(model: Model, video: Video, machine: Machine) -> tuple[list[Demand], dict[str, BudgetError], str]:
    """Encode (where there is an image) and decode; what no grid of tiles fits; the stage that needs all there is."""
    demands: list[Demand] = []
    failures: dict[str, BudgetError] = {}
    squeezed = ""
    for name, direction in _passes(video):

        def plan(room: int, direction: str = direction) -> TilePlan:
            return tile_plan(model, video, machine, direction, room)

        try:
            tiles, whole_room = with_margin(plan, room_of(machine))
        except BudgetError as error:
            failures[name] = error
            tiles, whole_room = tile_plan(model, video, machine, direction, 0, or_least=True), False
        squeezed = name if whole_room else squeezed
        demands.append(vae_demand(name, tiles, model.vae, video, machine))
    return demands, failures, squeezed
