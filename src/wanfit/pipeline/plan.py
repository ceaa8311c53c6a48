"""The memory plan of a run: from the headers of its files, its settings and this machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..memory.advice import Search, nearest
from ..memory.machine import Machine, this_machine
from ..memory.parts import Model, text_part, transformer_part, vae_part
from ..memory.plan import Options, Plan, make_plan
from .loras import ModelPatches
from .opened import OpenModel
from .placement import Placement
from .request import Settings


def plan_run(
    model: Model,
    settings: Settings,
    placement: Placement,
    patches: Sequence[ModelPatches] = (),
    *,
    text_tokens: int = 512,
) -> Plan:
    """What the run will need, and the chunk, tiles and budgets that it keeps to.

    Args:
        model: see `read_model`.
        patches: LoRAs, for each transformer. text_tokens: of the longest prompt.
    Raises: BudgetError: budget_exceeded: it does not fit; names the nearest settings that do.
    """
    machine = machine_of(placement)
    options = Options(
        image=settings.image is not None,
        chunk_tokens=placement.chunk_tokens,
        text_tokens=text_tokens,
        prompts=2 if settings.uses_guidance else 1,
        loras=bytes_of(patches, placement.dtype),
    )
    wanted = settings.width, settings.height, settings.num_frames
    plan = make_plan(model, machine, *wanted, options)
    if not plan.fits:
        found = nearest(Search(model, machine, options), *wanted)
        ways = [f"<width> {way.width}, <height> {way.height}, <num_frames> {way.num_frames}" for way in found]
        plan.require(
            f"What fits: {'; or '.join(ways)}"
            if ways
            else "Nothing of use fits at any size: free memory, or take a smaller file (fp8, Q4_K_M)"
        )
    return plan


def bytes_of(patches: Sequence[ModelPatches], dtype: torch.dtype) -> tuple[int, int]:
    """Of the LoRAs of the expert that has most of them, and of its largest block."""
    return max(((patch.nbytes(dtype), patch.largest(dtype)) for patch in patches), default=(0, 0))


def read_model(model: OpenModel) -> Model:
    """Sizes of all parts, from headers."""
    transformers = tuple(transformer_part(checkpoint) for _, checkpoint in model.transformers)
    return Model(transformers, text_part(model.text_encoder), vae_part(model.vae))


def machine_of(placement: Placement) -> Machine:
    """This machine, within the budgets that the run was given."""
    return this_machine(
        placement.device,
        placement.dtype,
        placement.vae_dtype,
        text="stream" if placement.text == "stream" else "cpu",
        policy=placement.policy,
        vram_budget=placement.vram_budget,
        ram_budget=placement.ram_budget,
    )
