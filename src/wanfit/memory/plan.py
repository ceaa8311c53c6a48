"""Whether a run fits, before anything is loaded; and the settings that it runs with.

A pure function of headers and numbers. The host runs by the plan's chunk, tiles and budgets, so that prediction
and behaviour cannot drift apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ..blocks import ForwardSettings
from ..checkpoint import VARIANTS, Variant
from ..errors import BudgetError, InputError
from ..offload.policy import blocks_to_hide, resident_within
from ..vae.job import TilePlan
from ..vae.plan import plan_decode, plan_encode
from .demand import (
    RING,
    Demand,
    Video,
    denoise_demand,
    switch_demand,
    text_demand,
    vae_demand,
    vae_weights,
    video_to_encode,
)
from .machine import Machine
from .parts import TextPart, TransformerPart, VaePart
from .verdict import KEPT, TIGHT, Verdict, limits, room_of, verdict

GIB = 2**30
CHUNK_TOKENS = 4096
SMALLEST_CHUNK = 256
LORA_SHARE = 0.25
"""Of the device memory for weights, what LoRAs may take to stay there."""

VAE_MARGIN = 0.9
"""Of what is left, for the VAE: its shapes vary, and the allocator's pool with them."""


@dataclass(frozen=True)
class Model:
    """The parts of one model: one or two transformers in the order in which they run."""

    transformers: tuple[TransformerPart, ...]
    text_encoder: TextPart
    vae: VaePart

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.transformers[0].variant]

    @property
    def slot_bytes(self) -> int:
        """Of a device slot: the largest block of any expert."""
        return max(part.block_bytes for part in self.transformers)


@dataclass(frozen=True)
class Traffic:
    """Copies of blocks in one forward, and what they cost.

    Args:
        copied: bytes from RAM to the device. read: bytes from disk before that.
        seconds: of the copies and reads, where a speed is known.
        slowdown: time of a forward in units of its computation alone; 1.0: all copies are hidden; None: unknown.
    """

    copied: int
    read: int
    seconds: float | None
    slowdown: float | None


@dataclass(frozen=True)
class Plan:
    """What a run will need, stage by stage, and how it runs.

    Args:
        chunk_tokens: of the block forward.
        weights_budget: device bytes for blocks, passing ones included.
        ram_budget: host bytes for blocks.
        vae_budget: device bytes for a pass of the VAE, its weights included; on the CPU bytes of RAM.
        keep_loras: LoRAs stay on the device; otherwise they are copied with each block.
        resident: blocks that stay on the device, at the most.
        cached: blocks of all experts that stay in RAM.
        stages: in order.
        verdict: of the whole.
        limiting: the stage that decides, empty when everything fits easily.
        reason: one sentence about it.
        traffic: None on the CPU.
    """

    video: Video
    machine: Machine
    chunk_tokens: int
    weights_budget: int
    ram_budget: int
    vae_budget: int
    keep_loras: bool
    resident: int
    cached: int
    stages: tuple[Demand, ...]
    verdict: Verdict
    limiting: str
    reason: str
    traffic: Traffic | None

    @property
    def fits(self) -> bool:
        return self.verdict != "does not fit"

    def require(self, change: str = "") -> None:
        """Raises: BudgetError: budget_exceeded, when the run does not fit. `change`: what would."""
        if not self.fits:
            raise BudgetError("budget_exceeded", "plan", self.reason, change)

    def to_json(self) -> dict[str, object]:
        """All figures, in bytes."""
        stages: list[dict[str, object]] = []
        for stage in self.stages:
            numbers = {"vram_needed": stage.vram_needed, "vram_peak": stage.vram_peak, "ram_needed": stage.ram_needed}
            stages.append({**asdict(stage), **numbers})
        return {
            "verdict": self.verdict,
            "limiting_stage": self.limiting,
            "reason": self.reason,
            "width": self.video.width,
            "height": self.video.height,
            "num_frames": self.video.num_frames,
            "tokens": self.video.tokens,
            "vram": self.machine.vram,
            "ram": self.machine.ram,
            "vram_taken": dict(self.machine.vram_taken),
            "ram_taken": dict(self.machine.ram_taken),
            "chunk_tokens": self.chunk_tokens,
            "policy": self.machine.policy,
            "resident_blocks": self.resident,
            "cached_blocks": self.cached,
            "weights_budget": self.weights_budget,
            "ram_budget": self.ram_budget,
            "vae_budget": self.vae_budget,
            "keep_loras": self.keep_loras,
            "traffic": None if self.traffic is None else asdict(self.traffic),
            "stages": stages,
        }


def make_plan(
    model: Model,
    machine: Machine,
    width: int,
    height: int,
    num_frames: int,
    *,
    image: bool | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    text_tokens: int = 512,
    prompts: int = 2,
    loras: tuple[int, int] = (0, 0),
) -> Plan:
    """The plan of one video.

    Args:
        width, height, num_frames: as the model takes them.
        image: whether an image is encoded; None: where the model needs one.
        chunk_tokens: at most; the plan takes less where that is what fits.
        prompts: 2 with guidance, else 1.
        loras: bytes of the changes of all blocks, and of the block that has most of them.

    Raises:
        InputError: size_invalid, frames_invalid. A run that does not fit is a verdict, not an error.
    """
    variant = model.variant
    _check(width, height, num_frames, variant.size_multiple)
    has_image = variant.needs_image if image is None else image
    video = Video(width, height, num_frames, has_image, variant.size_multiple, text_tokens, prompts)
    text = text_demand(model.text_encoder, video, machine)
    chunk, denoise = _denoise(model, video, machine, chunk_tokens)
    keep_loras = _keep_loras(denoise, machine, loras[0])
    ram_budget = machine.ram_budget
    if loras[0]:
        extra = {"LoRA": loras[0] if keep_loras else min(loras[0], 2 * loras[1])}
        kind = "vram" if machine.device == "cuda" else "ram"
        denoise = [replace(demand, **{kind: getattr(demand, kind) | extra}) for demand in denoise]
    if loras[0] and not keep_loras:  # pinned in RAM
        ram_budget = max(0, ram_budget - loras[0])
        denoise = [replace(demand, ram={**demand.ram, "LoRA": loras[0]}) for demand in denoise]
    vae, failures, squeezed = _vae_stages(model, video, machine)
    worst = max(denoise, key=lambda demand: demand.vram_needed)
    weights_budget, resident = _resident(model, machine, worst)
    slots = model.slot_bytes
    denoise = [replace(demand, optional=_optional(resident, slots, model)) for demand in denoise]
    cached = 0
    if machine.device == "cuda":
        cached = _cached(ram_budget, slots, sum(part.num_layers for part in model.transformers))
        kept = {KEPT: cached * slots}
        denoise = [replace(demand, ram={**demand.ram, **kept}) for demand in denoise]
    stages = [text, *vae[:-1], denoise[0]]
    if len(denoise) == 2:
        stages += [switch_demand(denoise[0], model.transformers[1], machine), denoise[1]]
    stages.append(vae[-1])
    found, limiting, reason = verdict(stages, machine, failures)
    if found == "fits" and (squeezed or chunk < min(chunk_tokens, CHUNK_TOKENS)):
        limiting = squeezed or denoise[0].name
        found, reason = "tight", f"{limiting} fits only in smaller pieces than it would take with more memory"
    return Plan(
        video=video,
        machine=machine,
        chunk_tokens=chunk,
        weights_budget=weights_budget,
        ram_budget=ram_budget,
        vae_budget=room_of(machine),
        keep_loras=keep_loras,
        resident=resident,
        cached=cached,
        stages=tuple(stages),
        verdict=found,
        limiting=limiting,
        reason=reason,
        traffic=_traffic(model, machine, resident, cached),
    )


def may_fit(model: Model, machine: Machine, width: int, height: int, num_frames: int) -> bool:
    """Whether the denoising alone fits: far quicker than the whole plan where it does not."""
    video = Video(width, height, num_frames, False, model.variant.size_multiple)
    _, demands = _denoise(model, video, machine, SMALLEST_CHUNK)
    return all(needed <= room for demand in demands for _, needed, room in limits(demand, machine))


def _check(width: int, height: int, num_frames: int, multiple: int) -> None:
    for name, value in (("width", width), ("height", height)):
        if not multiple <= value <= 1024 * multiple or value % multiple:
            raise InputError(
                "size_invalid",
                "plan",
                f"<{name}> is {value}",
                f"Use a multiple of {multiple}, {multiple} to {1024 * multiple}",
            )
    if not 1 <= num_frames <= 4 * 1023 + 1 or num_frames % 4 != 1:
        raise InputError("frames_invalid", "plan", f"<num_frames> is {num_frames}", "Use 4n+1, 1 to 4093, such as 81")


def _denoise(model: Model, video: Video, machine: Machine, most: int) -> tuple[int, list[Demand]]:
    """The largest chunk, by halves, whose forward fits; the smallest when none does."""
    names = ("denoise high", "denoise low") if len(model.transformers) == 2 else ("denoise",)
    room = machine.vram if machine.device == "cuda" else machine.ram
    chunk = most
    while True:
        settings = ForwardSettings(chunk)
        demands = [
            denoise_demand(name, part, model.slot_bytes, video, machine, settings)
            for name, part in zip(names, model.transformers, strict=True)
        ]
        needed = max(d.vram_needed if machine.device == "cuda" else d.ram_needed for d in demands)
        if needed <= room * TIGHT or chunk <= SMALLEST_CHUNK:
            return chunk, demands
        chunk = max(SMALLEST_CHUNK, chunk // 2)


def _keep_loras(denoise: Sequence[Demand], machine: Machine, nbytes: int) -> bool:
    """Whether LoRAs take no more than their share of what is left beside the blocks that pass."""
    needed = max(demand.vram_needed for demand in denoise)
    return machine.device == "cpu" or nbytes <= LORA_SHARE * (machine.vram - needed)


def decode_shape(model: Model, video: Video) -> tuple[int, int, int, int, int]:
    """Latents (B, C, T, h, w) of the video."""
    step = video.size_multiple // 2
    channels = 16 if model.vae.variant == "vae-2.1" else 48
    return 1, channels, video.latent_frames, video.height // step, video.width // step


def tile_plan(model: Model, video: Video, machine: Machine, direction: str, room: int) -> TilePlan:
    """The VAE's plan within `room` bytes, which its weights and what it works on have to share.

    Raises: BudgetError: budget_exceeded.
    """
    vae, dtype, device = model.vae.module(), machine.vae_dtype, machine.device
    single = direction == "encode" and model.variant.expand_timesteps
    held = video_to_encode(video, machine, single=single) if direction == "encode" else 0
    shape = decode_shape(model, video)
    if direction == "encode":
        shape = (1, 3, 1 if single else video.num_frames, video.height, video.width)
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


def _vae_stages(model: Model, video: Video, machine: Machine) -> tuple[list[Demand], dict[str, BudgetError], str]:
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


def _resident(model: Model, machine: Machine, worst: Demand) -> tuple[int, int]:
    """Device bytes for blocks, and how many blocks stay, at the most."""
    if machine.device == "cpu":
        return 0, 0
    count = max(part.num_layers for part in model.transformers)
    budget = max(0, machine.vram - (worst.vram_needed - RING * model.slot_bytes))
    if machine.policy == "stream":
        return budget, 0
    limit = resident_within(budget, model.slot_bytes, RING, count)
    if machine.policy == "resident":
        return budget, count
    speeds = machine.speeds
    if speeds is None or speeds.block_seconds is None:
        return budget, limit
    wanted = blocks_to_hide(count, model.slot_bytes / speeds.bandwidth, speeds.block_seconds)
    return budget, min(wanted, limit)


def _optional(resident: int, slot_bytes: int, model: Model) -> int:
    """Device bytes of the blocks that stay; with all of them there, no block passes."""
    count = max(part.num_layers for part in model.transformers)
    return (resident - (RING if resident == count else 0)) * slot_bytes if resident else 0


def _cached(ram_budget: int, slot_bytes: int, blocks: int) -> int:
    """Blocks that host memory keeps; as `offload.store` decides."""
    if ram_budget >= slot_bytes * blocks:
        return blocks
    return max(0, ram_budget // slot_bytes - RING)


def _traffic(model: Model, machine: Machine, resident: int, cached: int) -> Traffic | None:
    """Of one forward in the long run; blocks that RAM does not keep come from disk each time."""
    if machine.device == "cpu":
        return None
    count, slot = max(part.num_layers for part in model.transformers), model.slot_bytes
    passing = count - resident
    read = max(0, passing - cached)  # the running expert's blocks take the places of the other one's
    copied_bytes, read_bytes = passing * slot, read * slot
    speeds = machine.speeds
    if speeds is None:
        return Traffic(copied_bytes, read_bytes, None, None)
    seconds = copied_bytes / speeds.bandwidth
    if read_bytes:
        if speeds.disk is None:
            return Traffic(copied_bytes, read_bytes, None, None)
        seconds = max(seconds, read_bytes / speeds.disk)  # reading and copying overlap
    if speeds.block_seconds is None:
        return Traffic(copied_bytes, read_bytes, seconds, None)
    return Traffic(copied_bytes, read_bytes, seconds, max(1.0, seconds / (count * speeds.block_seconds)))
