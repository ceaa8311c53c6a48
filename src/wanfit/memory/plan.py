"""Whether a run fits, before anything is loaded; and the settings that it runs with.

A pure function of headers and numbers. The host runs by the plan's chunk, tiles and budgets, so that prediction
and behaviour cannot drift apart.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from ..blocks import ForwardSettings
from ..errors import BudgetError, InputError
from .demand import Demand, Video, denoise_demand, switch_demand, text_demand
from .machine import Machine
from .parts import Model
from .residency import (
    Traffic,
    cached_blocks,
    keeps_loras,
    optional_bytes,
    resident_blocks,
    speeds_known,
    traffic_of,
)
from .tiles import vae_stages
from .verdict import KEPT, TIGHT, Verdict, room_of, verdict, within

GIB = 2**30
CHUNK_TOKENS = 4096
SMALLEST_CHUNK = 256


@dataclass(frozen=True)
class Options:
    """What a plan can be asked for beside the size.

    Args:
        image: whether an image is encoded; None: where the model needs one.
        chunk_tokens: at most; the plan takes less where that is what fits.
        text_tokens: of the longest prompt. prompts: 2 with guidance, else 1.
        loras: bytes of the changes of all blocks, and of the block that has most of them.
        batch: videos in one forward.
        packed_attention: q, k and v in 8 bits, see `ForwardSettings`.
    """

    image: bool | None = None
    chunk_tokens: int = CHUNK_TOKENS
    text_tokens: int = 512
    prompts: int = 2
    loras: tuple[int, int] = (0, 0)
    batch: int = 1
    packed_attention: bool = False


@dataclass(frozen=True)
class Plan:
    """What a run will need, stage by stage, and how it runs.

    Args:
        chunk_tokens, packed_attention: of the block forward.
        weights_budget: device bytes for blocks, passing ones included.
        ram_budget: host bytes for blocks.
        vae_budget: device bytes for a pass of the VAE, its weights included; on the CPU bytes of RAM.
        keep_loras: LoRAs stay on the device; otherwise they are copied with each block.
        resident: blocks that stay on the device; with the policy `auto` at the most, see `resident_least`.
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
    packed_attention: bool
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
    def resident_least(self) -> int:
        """Blocks that stay in any case. `auto` keeps those that it must so that copies are hidden, which is only known
        with the speeds of this machine: without them, from none to as many as there is room for."""
        return self.resident if self.machine.policy != "auto" or speeds_known(self.machine) else 0

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
            "batch": self.video.batch,
            "chunk_tokens": self.chunk_tokens,
            "packed_attention": self.packed_attention,
            "policy": self.machine.policy,
            "resident_blocks": self.resident,
            "resident_blocks_least": self.resident_least,
            "cached_blocks": self.cached,
            "weights_budget": self.weights_budget,
            "ram_budget": self.ram_budget,
            "vae_budget": self.vae_budget,
            "keep_loras": self.keep_loras,
            "traffic": None if self.traffic is None else asdict(self.traffic),
            "stages": stages,
        }


def make_plan(
    model: Model, machine: Machine, width: int, height: int, num_frames: int, options: Options | None = None
) -> Plan:
    """The plan of one video, or of a batch of them.

    Args:
        width, height, num_frames: as the model takes them.

    Raises:
        InputError: size_invalid, frames_invalid. A run that does not fit is a verdict, not an error.
    """
    options = options or Options()
    _check(width, height, num_frames, model.variant.size_multiple)
    video = video_of(model, width, height, num_frames, options)
    text = text_demand(model.text_encoder, video, machine)
    chunk, denoise = _denoise(model, video, machine, options, options.chunk_tokens)
    denoise, keep_loras = _with_loras(denoise, machine, options.loras)
    ram_budget = machine.ram_budget
    if options.loras[0] and not keep_loras:
        ram_budget = max(0, ram_budget - options.loras[0])
    vae, failures, squeezed = vae_stages(model, video, machine)
    worst = max(denoise, key=lambda demand: demand.vram_needed)
    weights_budget, resident = resident_blocks(model, machine, worst)
    slots = model.slot_bytes
    denoise = [replace(demand, optional=optional_bytes(resident, slots, model)) for demand in denoise]
    cached = 0
    if machine.device == "cuda":
        cached = cached_blocks(ram_budget, slots, sum(part.num_layers for part in model.transformers))
        kept = {KEPT: cached * slots}
        denoise = [replace(demand, ram={**demand.ram, **kept}) for demand in denoise]
    stages = [text, *vae[:-1], denoise[0]]
    if len(denoise) == 2:
        stages += [switch_demand(denoise[0], model.transformers[1], machine), denoise[1]]
    stages.append(vae[-1])
    found, limiting, reason = verdict(stages, machine, failures)
    if found == "fits" and (squeezed or chunk < min(options.chunk_tokens, CHUNK_TOKENS)):
        limiting = squeezed or denoise[0].name
        found, reason = "tight", f"{limiting} fits only in smaller pieces than it would take with more memory"
    return Plan(
        video=video,
        machine=machine,
        chunk_tokens=chunk,
        packed_attention=options.packed_attention,
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
        traffic=traffic_of(model, machine, resident, cached),
    )


def denoising_fits(model: Model, machine: Machine, video: Video, options: Options) -> bool:
    """Whether everything but the VAE's passes fits: far quicker than the whole plan."""
    _, demands = _denoise(model, video, machine, options, SMALLEST_CHUNK)
    demands, _ = _with_loras(demands, machine, options.loras)
    return all(within(demand, machine) for demand in (text_demand(model.text_encoder, video, machine), *demands))


def video_of(model: Model, width: int, height: int, num_frames: int, options: Options) -> Video:
    image = model.variant.needs_image if options.image is None else options.image
    multiple = model.variant.size_multiple
    return Video(width, height, num_frames, image, multiple, options.text_tokens, options.prompts, batch=options.batch)


def _check(width: int, height: int, num_frames: int, multiple: int) -> None:
    for name, value in (("width", width), ("height", height)):
        if not multiple <= value <= 1024 * multiple or value % multiple:
            raise InputError(
                "size_invalid",
                "plan",
                f"<{name}> is {value}",
                f"Use a multiple of {multiple}, {multiple} to {1024 * multiple}",
            )
    check_frames(num_frames)


def check_frames(num_frames: int) -> None:
    """Refuse a length that no Wan model takes. Raises: InputError: frames_invalid."""
    if not 1 <= num_frames <= 4 * 1023 + 1 or num_frames % 4 != 1:
        raise InputError("frames_invalid", "plan", f"<num_frames> is {num_frames}", "Use 4n+1, 1 to 4093, such as 81")


def _denoise(model: Model, video: Video, machine: Machine, options: Options, most: int) -> tuple[int, list[Demand]]:
    """The largest chunk, by halves, whose forward fits beside passing LoRAs; the smallest when none does."""
    names = ("denoise high", "denoise low") if len(model.transformers) == 2 else ("denoise",)
    passing = _passing(options.loras)
    chunk = most
    while True:
        settings = ForwardSettings(chunk, packed_attention=options.packed_attention)
        demands = [
            denoise_demand(name, part, model.slot_bytes, video, machine, settings, loras=bool(options.loras[0]))
            for name, part in zip(names, model.transformers, strict=True)
        ]
        needed = max(d.vram_needed if machine.device == "cuda" else d.ram_needed for d in demands)
        if needed + passing <= room_of(machine) * TIGHT or chunk <= SMALLEST_CHUNK:
            return chunk, demands
        chunk = max(SMALLEST_CHUNK, chunk // 2)


def _passing(loras: tuple[int, int]) -> int:
    """Bytes of LoRAs on the device when they are copied with their blocks."""
    return min(loras[0], 2 * loras[1])


def _with_loras(denoise: list[Demand], machine: Machine, loras: tuple[int, int]) -> tuple[list[Demand], bool]:
    """The demands with LoRAs counted, and whether these stay on the device; otherwise they are pinned in RAM."""
    keep = keeps_loras(denoise, machine, loras[0])
    if not loras[0]:
        return denoise, keep
    there = {"LoRA": loras[0] if keep else _passing(loras)}
    if machine.device == "cpu":
        return [replace(demand, ram={**demand.ram, **there}) for demand in denoise], keep
    pinned: dict[str, int] = {} if keep else {"LoRA": loras[0]}
    return [replace(demand, vram={**demand.vram, **there}, ram={**demand.ram, **pinned}) for demand in denoise], keep
