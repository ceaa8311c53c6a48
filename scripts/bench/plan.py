"""What `wanfit plan` predicts against what a card really takes: forwards of the transformer, passes of the VAE.

    python scripts/dev.py bench plan --list                           the predictions alone; needs no card
    python scripts/dev.py bench plan --json docs/measurements/plan.json
    python scripts/dev.py bench plan --case "5b,fp8 480p"              those whose line holds one of these
    python scripts/dev.py bench plan --edges                          the plan's yes, no and suggestions at the edge

Weights of zeros at real size; three blocks, which is enough for the peak, and one forward (six with the policy
`auto`, which measures first: its row is predicted with the speeds by which the store last decided, and holds the blocks
that the plan says stay and those that did). One line a configuration: predicted and measured peak of PyTorch's
allocator, and the error: above 0 the plan says more than was taken. The whole job, with the plan in each report:
`bench full_size`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from lora import random_lora
from plan_edges import EDGES, edge
from plan_runs import (
    GIB,
    SIZES,
    Block,
    part_of,
    peak,
    predicted_forward,
    run_decode,
    run_forward,
    start_libraries,
    zero_block,
)

from wanfit.errors import WanFitError
from wanfit.memory.demand import Video, vae_demand
from wanfit.memory.machine import Machine, Speeds, stated_machine, this_machine
from wanfit.memory.parts import Model
from wanfit.memory.plan import Options, make_plan
from wanfit.memory.presets import text_preset, transformer_preset, vae_preset
from wanfit.memory.tiles import tile_plan


@dataclass(frozen=True)
class Forward:
    preset: str
    size: str
    frames: int
    policy: str = "stream"
    packed: bool = False
    blocks: int = 3
    batch: int = 1
    rank: int = 0
    """Of a LoRA on all linears."""


@dataclass(frozen=True)
class Decode:
    variant: str
    size: str
    frames: int
    gib: float


FORWARDS = [
    *(Forward("i2v-a14b:fp8", size, n) for size, n in (("480p", 33), ("480p", 81), ("480p", 121), ("720p", 33))),
    *(Forward("i2v-a14b:fp8", size, n) for size, n in (("720p", 81), ("720p", 121), ("1088p", 33), ("1088p", 81))),
    *(Forward("i2v-a14b:fp8", size, 81, packed=True) for size in ("480p", "720p")),
    *(Forward("i2v-a14b:fp8", "480p", 81, policy, blocks=8) for policy in ("resident", "auto")),
    Forward("t2v-a14b:bf16", "480p", 5, "auto", blocks=6),
    Forward("t2v-a14b:fp8", "480p", 33, batch=2),
    *(Forward("t2v-a14b:fp8", "480p", n, rank=64) for n in (5, 81)),
    *(Forward("t2v-a14b:bf16", size, n) for size, n in (("480p", 33), ("720p", 81))),
    *(Forward("i2v-a14b:q8_0", size, n) for size, n in (("480p", 81), ("720p", 33), ("720p", 121))),
    *(Forward("i2v-a14b:q4_k_m", size, n) for size, n in (("480p", 33), ("720p", 81), ("1088p", 33))),
    Forward("i2v-a14b:q4_k_m", "720p", 81, packed=True),
    Forward("t2v-a14b:q4_k_m", "480p", 81, "resident", blocks=8),
    *(Forward("ti2v-5b:fp16", size, n) for size, n in (("480p", 33), ("720p", 81), ("720p", 121))),
]
DECODES = [
    *(Decode("vae-2.1", size, n, g) for size, n, g in (("480p", 33, 16.0), ("480p", 81, 4.0), ("720p", 33, 4.0))),
    *(Decode("vae-2.1", size, n, g) for size, n, g in (("720p", 33, 16.0), ("720p", 33, 2.0), ("1088p", 33, 8.0))),
    *(Decode("vae-2.2", size, n, g) for size, n, g in (("480p", 33, 16.0), ("720p", 33, 4.0), ("720p", 81, 4.0))),
    *(Decode("vae-2.2", size, n, g) for size, n, g in (("720p", 33, 16.0), ("1088p", 33, 8.0))),
    *(Decode("vae-2.1", size, 33, g) for size, g in (("480p", 0.7), ("720p", 1.2))),
    *(Decode("vae-2.2", "480p", 33, g) for g in (1.8, 2.2)),
]


Row = dict[str, object]


def forward_row(case: Forward, machine: Machine, block: Block, *, listed: bool) -> Row:
    part = part_of(case.preset, block, case.blocks)
    model = Model((part,), text_preset(), vae_preset("vae-2.2" if part.in_channels == 48 else "vae-2.1"))
    multiple = model.variant.size_multiple
    width, height = (side // multiple * multiple for side in SIZES[case.size])
    loras = random_lora(case.rank, case.blocks) if case.rank else {}
    sizes = [patches.nbytes(torch.bfloat16) for patches in loras.values()]
    both = sum(sizes), max(sizes, default=0)
    options = Options(image=False, batch=case.batch, packed_attention=case.packed, loras=both)
    machine = dataclasses.replace(machine, policy=case.policy)
    plan = make_plan(model, machine, width, height, case.frames, options)
    row: Row = {}
    measured = None
    if not listed:
        run = partial(run_forward, part, block, plan, passes=6 if case.policy == "auto" else 1, loras=loras)
        reports = []
        measured = peak(lambda: reports.append(run()))
        report = reports[0]
        if case.policy == "auto":
            speeds = Speeds(report.speed.bandwidth, report.speed.block_seconds)
            plan = make_plan(model, dataclasses.replace(machine, speeds=speeds), width, height, case.frames, options)
            row |= {"speeds": dataclasses.asdict(speeds), "planned_blocks": plan.resident, "kept": report.resident}
    stage = next(stage for stage in plan.stages if stage.name.startswith("denoise"))
    causes = dict(stage.vram) | ({"blocks that stay": stage.optional} if stage.optional else {})
    return _row(predicted_forward(part, plan), causes, measured) | row


def decode_row(case: Decode, machine: Machine, *, listed: bool) -> Row:
    name = "t2v-a14b:fp8" if case.variant == "vae-2.1" else "ti2v-5b:fp16"
    model = Model((transformer_preset(name),), text_preset(), vae_preset(case.variant))
    multiple = model.variant.size_multiple
    width, height = (side // multiple * multiple for side in SIZES[case.size])
    video = Video(width, height, case.frames, False, multiple)
    tiles = tile_plan(model, video, machine, "decode", int(case.gib * GIB))
    demand = vae_demand("decode and save", tiles, model.vae, video, machine)
    measured = None if listed else peak(partial(run_decode, model, video, tiles))
    cut: Row = {"grid": tiles.grid, "split": tiles.split, "chunk": tiles.chunk}
    return _row(demand.vram_needed, demand.vram, measured) | cut


def _row(predicted: int, causes: Mapping[str, int], measured: object) -> Row:
    row: Row = {"predicted": predicted}
    if measured is not None:
        row |= dataclasses.asdict(measured)
        row["error"] = round(predicted / int(str(row["allocated"])) - 1, 4)
    return row | {"causes": dict(causes)}


def rows_of(cases: list[Forward | Decode], machine: Machine, *, listed: bool) -> Iterator[Row]:
    blocks: dict[str, Block] = {}
    for case in cases:
        row: Row = {"part": type(case).__name__.lower(), **dataclasses.asdict(case)}
        try:
            if isinstance(case, Forward):
                if case.preset not in blocks:
                    blocks = {case.preset: zero_block(case.preset)}
                row |= forward_row(case, machine, blocks[case.preset], listed=listed)
            else:
                row |= decode_row(case, machine, listed=listed)
        except (RuntimeError, WanFitError) as error:
            row["failed"] = f"{type(error).__name__}: {error}"[:400]
        yield row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="predictions only")
    parser.add_argument("--case", default="", help="parts of lines, with commas")
    parser.add_argument("--edges", action="store_true", help="yes, no and suggestions at the edge")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        if not options.list:
            parser.error("no CUDA device: use --list")
        machine = dataclasses.replace(stated_machine(80, 64, capability=(9, 0)), fused=True)
    else:
        start_libraries()
        machine = this_machine(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    words = options.case.split(",")
    every = EDGES if options.edges else [*FORWARDS, *DECODES]
    lines = {case: " ".join(str(value) for value in dataclasses.astuple(case)) for case in every}
    cases = [case for case, line in lines.items() if any(word in line for word in words)]
    if options.edges:
        found = ({**dataclasses.asdict(case), **edge(case, machine)} for case in cases)
    else:
        found = rows_of(cases, machine, listed=options.list)
    rows: list[Row] = []
    for row in found:
        rows.append(row)
        print("  ".join(_text(value) for key, value in row.items() if key not in ("causes", "before")), flush=True)
        if options.json is not None:
            record = {"torch": torch.__version__, "card": card, "rows": rows}
            options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    errors = [float(str(row["error"])) for row in rows if "error" in row]
    if errors:
        print(f"{len(errors)} configurations, error {min(errors):+.1%} to {max(errors):+.1%}")
    return 0


def _text(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(each)}" for key, each in value.items()) + "}"
    return f"{value / GIB:.3f}" if isinstance(value, int) and value > 10**6 else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
