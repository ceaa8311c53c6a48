"""What `wanfit plan` predicts against what a card really takes: forwards of the transformer, passes of the VAE.

    python scripts/dev.py bench plan --list                           the predictions alone; needs no card
    python scripts/dev.py bench plan --json docs/measurements/plan.json
    python scripts/dev.py bench plan --edges                          some of them with no more memory than predicted

Weights of zeros at real size; three blocks, which is enough for the peak, and one forward. One line a configuration:
predicted and measured peak of PyTorch's allocator, and the error: above 0 the plan says more than was taken. The whole
job, with the plan in each report: `bench full_size`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from accelerate import init_empty_weights
from dit_weights import RepeatedFile

from wanfit.blocks import ForwardSettings
from wanfit.checkpoint.structure import transformer_tensors
from wanfit.errors import WanFitError
from wanfit.memory.demand import Demand, Video, denoise_demand, vae_demand
from wanfit.memory.machine import Machine, stated_machine, this_machine
from wanfit.memory.parts import TransformerPart
from wanfit.memory.plan import CHUNK_TOKENS, Model, decode_shape, tile_plan
from wanfit.memory.presets import _BLOCKS, _SHAPES, _formats, text_preset, transformer_preset, vae_preset
from wanfit.offload import BlockStore, Ladder
from wanfit.offload.layout import BlockLayout
from wanfit.pipeline.transformer import LeanTransformer
from wanfit.quant import StoredWeight
from wanfit.vae.decode import decode
from wanfit.vae.sinks import OrderedFrames

GIB = 2**30
SIZES = {"480p": (832, 480), "720p": (1280, 704), "1088p": (1920, 1088)}
LOOP = ("latents", "text embeddings")
"""Causes that belong to the sampling loop, which this script has not; its inputs are counted instead."""
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f8_e4m3": torch.float8_e4m3fn}


@dataclass(frozen=True)
class Forward:
    preset: str
    size: str
    frames: int
    policy: str = "stream"
    packed: bool = False
    blocks: int = 3


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
]
EDGES = [
    Forward("i2v-a14b:fp8", "480p", 33),
    Forward("i2v-a14b:fp8", "720p", 33),
    Forward("i2v-a14b:q4_k_m", "720p", 33),
    Decode("vae-2.1", "480p", 33, 16.0),
    Decode("vae-2.1", "720p", 33, 4.0),
    Decode("vae-2.2", "720p", 33, 4.0),
]


def zero_block(preset: str) -> dict[str, StoredWeight]:
    """Block 0 of the preset's file, all values 0, on the CPU."""
    variant, _, kind = preset.partition(":")
    shapes = transformer_tensors(**{"text_dim": 4096, "freq_dim": 256, **_SHAPES[variant]})
    formats = _formats(shapes, kind)
    block: dict[str, StoredWeight] = {}
    for name, shape in shapes.items():
        if not name.startswith("blocks.0."):
            continue
        key = formats[name]
        if key in DTYPES:
            data = torch.zeros(shape, dtype=DTYPES[key])
        else:
            elements, nbytes = _BLOCKS[key]
            data = torch.zeros((*shape[:-1], shape[-1] // elements * nbytes), dtype=torch.uint8)
        scale = {"scale": torch.ones(())} if key == "f8_e4m3" else {}
        block[name.removeprefix("blocks.0.")] = StoredWeight(key, tuple(shape), data, scale)
    return block


def part_of(case: Forward, block: dict[str, StoredWeight]) -> TransformerPart:
    formats = frozenset(weight.format for weight in block.values() if len(weight.shape) == 2)
    size = BlockLayout(block).nbytes
    return dataclasses.replace(
        transformer_preset(case.preset), block_bytes=size, formats=formats, num_layers=case.blocks
    )


def forward(case: Forward, machine: Machine, block: dict[str, StoredWeight]) -> tuple[Demand, int, Callable[[], None]]:
    """The plan's demand, the bytes predicted for what runs here, and the run."""
    part = part_of(case, block)
    multiple = 32 if case.preset.startswith("ti2v") else 16
    width, height = (side // multiple * multiple for side in SIZES[case.size])
    video = Video(width, height, case.frames, image=False, size_multiple=multiple)
    settings = ForwardSettings(CHUNK_TOKENS, packed_attention=case.packed)
    demand = denoise_demand("denoise", part, part.block_bytes, video, machine, settings)
    shape = (1, part.in_channels, video.latent_frames, height * 2 // multiple, width * 2 // multiple)
    given = 2 * (torch.Size(shape).numel() + 512 * 4096)
    outputs = 2 * torch.Size(shape).numel() * part.out_channels // part.in_channels
    predicted = demand.vram_needed - sum(demand.vram[cause] for cause in LOOP) + given + outputs
    if case.policy != "stream":
        predicted += (case.blocks - 2) * part.block_bytes
    return demand, predicted, partial(one_forward, case, part, block, settings, shape, video.tokens)


@torch.inference_mode()
def one_forward(
    case: Forward,
    part: TransformerPart,
    block: dict[str, StoredWeight],
    settings: ForwardSettings,
    shape: tuple[int, ...],
    tokens: int,
) -> None:
    device = torch.device("cuda", 0)
    with BlockStore([RepeatedFile(block, case.blocks)], device, policy=case.policy, ram_budget=64 * GIB) as store:
        with init_empty_weights():
            model = LeanTransformer(
                num_attention_heads=part.num_heads, attention_head_dim=128, in_channels=part.in_channels,
                out_channels=part.out_channels, text_dim=4096, ffn_dim=part.ffn_dim, num_layers=case.blocks,
            )  # fmt: skip
        ladder = Ladder(settings, store)
        model.attach(store.source(), part.shape, ladder)
        rope = model.rope.to(device)
        state = {
            name: torch.zeros(
                parameter.shape,
                device=device,
                dtype=torch.float32 if "time_embedder" in name or "scale_shift" in name else torch.bfloat16,
            )
            for name, parameter in model.named_parameters()
            if not name.startswith("blocks.")
        }
        model.load_state_dict(state, strict=False, assign=True)
        del state
        model.rope = rope
        steps = (1, tokens) if case.preset.startswith("ti2v") else (1,)
        model.eval().requires_grad_(False)(
            hidden_states=torch.zeros(shape, device=device, dtype=torch.bfloat16),
            timestep=torch.full(steps, 700.0, device=device),
            encoder_hidden_states=torch.zeros(1, 512, 4096, device=device, dtype=torch.bfloat16),
            return_dict=False,
        )
        if ladder.steps:
            print(f"note: the ladder went down: {ladder.steps}", flush=True)


def vae_pass(case: Decode, machine: Machine) -> tuple[Demand, int, Callable[[], None]]:
    name = "t2v-a14b:fp8" if case.variant == "vae-2.1" else "ti2v-5b:fp16"
    model = Model((transformer_preset(name),), text_preset(), vae_preset(case.variant))
    multiple = model.variant.size_multiple
    width, height = (side // multiple * multiple for side in SIZES[case.size])
    video = Video(width, height, case.frames, False, multiple)
    plan = tile_plan(model, video, machine, "decode", int(case.gib * GIB))
    demand = vae_demand("decode and save", plan, model.vae, video, machine)
    return demand, demand.vram_needed, partial(one_decode, model, video, plan)


@torch.inference_mode()
def one_decode(model: Model, video: Video, plan: object) -> None:
    vae = type(model.vae.module())(**dict(model.vae.module().config))
    vae = vae.to("cuda", torch.bfloat16).eval().requires_grad_(False)
    latents = torch.zeros(decode_shape(model, video), device="cuda")
    sink = OrderedFrames(lambda *_: None)
    try:
        decode(vae, latents, plan, sink)  # type: ignore[arg-type]
    finally:
        sink.close()


def peak(run: Callable[[], None]) -> dict[str, object]:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.max_memory_allocated() - before,
        "reserved": torch.cuda.max_memory_reserved(),
        "before": before,
        "seconds": round(time.perf_counter() - started, 2),
    }


def within(nbytes: int, run: Callable[[], None]) -> str:
    """What becomes of the run when PyTorch may have no more than `nbytes`."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(nbytes / total)
    try:
        run()
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, WanFitError) as error:
        return f"failed: {type(error).__name__}"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return "ran"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="predictions only")
    parser.add_argument(
        "--edges", action="store_true", help="a few, at the prediction and 5 %% below the measured peak"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not options.list and not torch.cuda.is_available():
        parser.error("no CUDA device: use --list")
    if torch.cuda.is_available():
        machine = this_machine(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16)
    else:
        machine = dataclasses.replace(stated_machine(80, 64, capability=(9, 0)), fused=True)
    card = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    rows: list[dict[str, object]] = []
    blocks: dict[str, dict[str, StoredWeight]] = {}
    for case in EDGES if options.edges else [*FORWARDS, *DECODES]:
        row: dict[str, object] = {"part": type(case).__name__.lower(), **dataclasses.asdict(case)}
        if isinstance(case, Forward):
            if case.preset not in blocks:
                blocks = {case.preset: zero_block(case.preset)}
            demand, predicted, run = forward(case, machine, blocks[case.preset])
        else:
            demand, predicted, run = vae_pass(case, machine)
        row |= {"predicted": predicted, "causes": dict(demand.vram)}
        if not options.list:
            try:
                row |= peak(run)
            except (RuntimeError, WanFitError, ValueError) as error:
                row["failed"] = f"{type(error).__name__}: {error}"[:400]
            if "allocated" in row:
                taken = int(str(row["allocated"]))
                row["error"] = round(predicted / taken - 1, 4)
                if options.edges:
                    row["at the prediction"] = within(predicted, run)
                    row["5 % below the peak"] = within(int(taken * 0.95), run)
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
    return f"{value / GIB:.3f}" if isinstance(value, int) and value > 10**6 else str(value)


if __name__ == "__main__":
    raise SystemExit(main())
