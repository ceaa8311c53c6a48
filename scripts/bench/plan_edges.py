"""`bench plan --edges`: a plan's word at the very edge of what fits.

For each case: the smallest card on which the plan still says that it fits, and 5 % less than what the run takes
there. On the first the run must get through as planned; on the second the plan says no, the same run must run out of
memory, and each setting that the plan suggests instead must get through as planned.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from plan_runs import GIB, SIZES, Block, Outcome, part_of, peak, run_decode, run_forward, within, zero_block

from wanfit.checkpoint import VARIANTS
from wanfit.memory.advice import Search, nearest
from wanfit.memory.machine import Machine
from wanfit.memory.parts import Model
from wanfit.memory.plan import Options, Plan, make_plan
from wanfit.memory.presets import text_preset, vae_preset
from wanfit.memory.tiles import tile_plan, with_margin
from wanfit.memory.verdict import room_of

STEP = 2**22
OPTIONS = Options(image=False)


@dataclass(frozen=True)
class Edge:
    preset: str
    size: str
    frames: int


EDGES = [
    Edge("i2v-a14b:bf16", "720p", 33),
    Edge("ti2v-5b:fp16", "480p", 33),  # here the decode needs most
    Edge("t2v-a14b:fp8", "720p", 33),
    Edge("t2v-a14b:fp8", "480p", 33),
    Edge("t2v-a14b:q4_k_m", "480p", 81),
    Edge("t2v-a14b:bf16", "720p", 81),
    Edge("ti2v-5b:fp16", "720p", 33),
    Edge("ti2v-5b:fp16", "720p", 81),
]


def card(machine: Machine, vram: int) -> Machine:
    return dataclasses.replace(machine, vram=vram, policy="stream")


def least(model: Model, machine: Machine, size: tuple[int, int, int]) -> int:
    """Bytes of the smallest card on which the plan says that it fits."""
    low, high = 0, 64 * GIB // STEP
    while low < high:
        middle = (low + high) // 2
        if make_plan(model, card(machine, middle * STEP), *size, OPTIONS).fits:
            high = middle
        else:
            low = middle + 1
    return low * STEP


@dataclass(frozen=True)
class Work:
    """One forward and the decode, as a plan says."""

    model: Model
    block: Block
    plan: Plan

    def forward(self) -> None:
        run_forward(self.model.transformers[0], self.block, self.plan)

    def decode(self) -> None:
        machine = self.plan.machine
        tiles, _ = with_margin(
            lambda room: tile_plan(self.model, self.plan.video, machine, "decode", room), room_of(machine)
        )
        run_decode(self.model, self.plan.video, tiles)

    def within(self, nbytes: int) -> Outcome:
        """Both, one after the other: the first that does not get through as planned, or the last."""
        forward = within(nbytes, self.forward)
        return within(nbytes, self.decode) if forward.as_planned else forward


def edge(case: Edge, machine: Machine) -> dict[str, object]:
    block = zero_block(case.preset)
    part = part_of(case.preset, block, 3)
    variant = VARIANTS[part.variant]
    model = Model((part,), text_preset(), vae_preset(variant.vae))
    multiple = variant.size_multiple
    width, height = (side // multiple * multiple for side in SIZES[case.size])
    size = width, height, case.frames
    fits = least(model, machine, size)
    plan = make_plan(model, card(machine, fits), *size, OPTIONS)
    work = Work(model, block, plan)
    peaks = {"forward": peak(work.forward).allocated, "decode": peak(work.decode).allocated}
    short = int(0.95 * max(peaks.values()))
    no = make_plan(model, card(machine, short), *size, OPTIONS)
    forced = within(short, work.forward if peaks["forward"] >= peaks["decode"] else work.decode)
    said: dict[str, object] = {
        "fits": fits,
        "verdict": plan.verdict,
        "chunk": plan.chunk_tokens,
        "peaks": peaks,
        "there": dataclasses.asdict(work.within(fits)),
        "short": short,
        "verdict there": no.verdict,
        "limiting": no.limiting,
        "forced": dataclasses.asdict(forced),
    }
    ways = {}
    for way in nearest(Search(model, card(machine, short), OPTIONS), *size):
        ways[way.describe()] = dataclasses.asdict(Work(model, block, way.plan).within(short))
    return said | {"suggestions": ways, "held": _held(said, ways)}


def _held(said: dict[str, object], ways: dict[str, dict[str, object]]) -> bool:
    """Whether each of the three lines is true; with no suggestion (nothing of use fits) the third says nothing."""

    def through(outcome: object) -> bool:
        return isinstance(outcome, dict) and outcome["end"] == "ran" and outcome["shortages"] == 0

    forced = said["forced"]
    failed = isinstance(forced, dict) and (forced["end"] != "ran" or forced["shortages"] > 0)
    return (
        through(said["there"])
        and said["verdict there"] == "does not fit"
        and failed
        and all(through(way) for way in ways.values())
    )
