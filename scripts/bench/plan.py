"""What `wanfit plan` predicts against what a card really takes: forwards of the 14B transformer, decodes of the VAE.

    python scripts/dev.py bench plan --list                           the predictions alone; needs no card
    python scripts/dev.py bench plan --json docs/measurements/plan.json
    python scripts/dev.py bench plan --layouts fp8_scaled --sizes 480p 720p --frames 33 81 --policies stream resident

Random weights at real size. One line a configuration: predicted and measured peak of PyTorch's allocator, and the
error: above 0 the plan says more than was taken. The whole job, with the plan in each report: `bench full_size`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from dit import SIZES, inputs
from dit_weights import RepeatedFile, build, stored_block

from wanfit.blocks import ForwardSettings
from wanfit.memory.demand import Video, denoise_demand, vae_demand
from wanfit.memory.machine import Machine, stated_machine, this_machine
from wanfit.memory.parts import TransformerPart
from wanfit.memory.plan import Model, decode_shape, tile_plan
from wanfit.memory.presets import text_preset, transformer_preset, vae_preset
from wanfit.offload import BlockStore, Ladder
from wanfit.offload.layout import BlockLayout
from wanfit.quant import StoredWeight
from wanfit.vae.decode import decode
from wanfit.vae.sinks import OrderedFrames

GIB = 2**30
PRESETS = {
    "bf16": "t2v-a14b:bf16",
    "fp8_scaled": "t2v-a14b:fp8",
    "q8_0": "t2v-a14b:q8_0",
    "q4_k": "t2v-a14b:q4_k_m",
    "q5_k": "t2v-a14b:q5_k_m",
    "q6_k": "t2v-a14b:q6_k",
}
LOOP = ("latents", "text embeddings")
"""Causes that belong to the sampling loop, which this script has not; its inputs are counted instead."""


def machine_here() -> Machine:
    if torch.cuda.is_available():
        return this_machine(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16)
    return dataclasses.replace(stated_machine(80, 64, capability=(9, 0)), fused=True)


def part_of(layout: str, block: dict[str, StoredWeight], blocks: int) -> TransformerPart:
    return dataclasses.replace(
        transformer_preset(PRESETS[layout]),
        block_bytes=BlockLayout(block).nbytes,
        formats=frozenset(weight.format for weight in block.values() if len(weight.shape) == 2),
        num_layers=blocks,
    )


def forwards(options: argparse.Namespace, machine: Machine) -> Iterator[dict[str, object]]:
    device = torch.device("cuda" if torch.cuda.is_available() and not options.list else "cpu")
    settings = ForwardSettings(options.chunk)
    for layout in options.layouts:
        block = {} if options.list else stored_block(layout, device)
        part = transformer_preset(PRESETS[layout]) if options.list else part_of(layout, block, options.blocks)
        for policy, size, frames in itertools.product(options.policies, options.sizes, options.frames):
            width, height = SIZES[size]
            video = Video(width, height, frames, image=False)
            demand = denoise_demand("denoise", part, part.block_bytes, video, machine, settings)
            given = 2 * (16 * video.latent_frames * (width // 8) * (height // 8) + 512 * 4096)
            predicted = demand.vram_needed - sum(demand.vram[cause] for cause in LOOP) + given
            if policy == "resident":
                predicted += (options.blocks - 2) * part.block_bytes
            row = {"part": "forward", "layout": layout, "policy": policy, "size": size, "frames": frames}
            if options.list:
                yield row | {"predicted": predicted}
                continue
            yield row | compare(predicted, partial(one_forward, options, block, policy, settings, size, frames, device))


def one_forward(
    options: argparse.Namespace,
    block: dict,
    policy: str,
    settings: ForwardSettings,
    size: str,
    frames: int,
    device: torch.device,
) -> None:
    with BlockStore([RepeatedFile(block, options.blocks)], device, policy=policy, ram_budget=40 * GIB) as store:
        model = build(store.source(), Ladder(settings, store), options.blocks, device)
        given = inputs(size, frames, device, torch.bfloat16)
        for _ in range(2):
            model(**given, return_dict=False)
        if model.ladder.steps:
            print(f"note: the ladder went down: {model.ladder.steps}", file=sys.stderr)


def decodes(options: argparse.Namespace, machine: Machine) -> Iterator[dict[str, object]]:
    for variant, size, frames, budget in itertools.product(
        options.vaes, options.sizes, options.frames, options.vae_gib
    ):
        name = "t2v-a14b:fp8" if variant == "vae-2.1" else "ti2v-5b:fp16"
        model = Model((transformer_preset(name),), text_preset(), vae_preset(variant))
        width, height = SIZES[size]
        multiple = model.variant.size_multiple
        video = Video(width // multiple * multiple, height // multiple * multiple, frames, False, multiple)
        plan = tile_plan(model, video, machine, "decode", int(budget * GIB))
        demand = vae_demand("decode and save", plan, model.vae, video, machine)
        row = {"part": variant, "size": size, "frames": frames, "gib": budget, "grid": plan.grid}
        if options.list:
            yield row | {"predicted": demand.vram_needed}
            continue
        yield row | compare(demand.vram_needed, partial(one_decode, model, video, plan))


def one_decode(model: Model, video: Video, plan: object) -> None:
    module = type(model.vae.module())(**dict(model.vae.module().config))
    vae = module.to("cuda", torch.bfloat16).eval().requires_grad_(False)
    latents = torch.randn(decode_shape(model, video), device="cuda")
    sink = OrderedFrames(lambda *_: None)
    try:
        decode(vae, latents, plan, sink)
    finally:
        sink.close()


def compare(predicted: int, run) -> dict[str, object]:  # noqa: ANN001
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    allocated = torch.cuda.max_memory_allocated() - before
    reserved = torch.cuda.max_memory_reserved()
    return {
        "predicted": predicted,
        "allocated": allocated,
        "reserved": reserved,
        "error": round(predicted / allocated - 1, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="predictions only")
    parser.add_argument("--layouts", nargs="*", default=["bf16", "fp8_scaled", "q8_0", "q4_k"], choices=PRESETS)
    parser.add_argument("--sizes", nargs="+", default=["480p", "720p"], choices=SIZES)
    parser.add_argument("--frames", nargs="+", type=int, default=[33, 81])
    parser.add_argument("--policies", nargs="+", default=["stream", "resident"])
    parser.add_argument("--vaes", nargs="*", default=["vae-2.1", "vae-2.2"])
    parser.add_argument("--vae-gib", nargs="+", type=float, default=[4.0, 16.0])
    parser.add_argument("--chunk", type=int, default=4096)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.list and not torch.cuda.is_available():
        parser.error("no CUDA device: use --list")
    machine = machine_here()
    rows: list[dict[str, object]] = []
    for row in itertools.chain(forwards(options, machine), decodes(options, machine)):
        rows.append(row)
        print("  ".join(f"{key} {_text(value)}" for key, value in row.items()), flush=True)
    if options.json is not None:
        card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
        record = {"torch": torch.__version__, "card": card, "rows": rows}
        options.json.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    errors = [float(str(row["error"])) for row in rows if "error" in row]
    if errors:
        print(f"{len(errors)} configurations, error {min(errors):+.1%} to {max(errors):+.1%}")
    return 0


def _text(value: object) -> str:
    return f"{value / GIB:.3f} GiB" if isinstance(value, int) and value > 10**6 else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
