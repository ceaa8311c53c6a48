"""The runs that a plan is held against: forwards of a transformer, passes of a VAE; weights of zeros at real size."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import closing, nullcontext
from dataclasses import dataclass

import torch
from accelerate import init_empty_weights
from diffusers import AutoencoderKLWan
from dit_weights import RepeatedFile

from wanfit.blocks import BlockPatches, ForwardSettings
from wanfit.checkpoint.structure import transformer_tensors
from wanfit.errors import WanFitError
from wanfit.memory.demand import LIBRARIES, Video
from wanfit.memory.parts import Model, TransformerPart
from wanfit.memory.plan import Plan
from wanfit.memory.presets import _BLOCKS, _SHAPES, _formats, transformer_preset
from wanfit.memory.tiles import decode_shape
from wanfit.offload import BlockStore, Ladder, PatchStore
from wanfit.offload.layout import BlockLayout
from wanfit.offload.store import OffloadReport
from wanfit.pipeline.transformer import LeanTransformer
from wanfit.quant import StoredWeight
from wanfit.vae.config import diffusers_config
from wanfit.vae.decode import decode
from wanfit.vae.sinks import OrderedFrames
from wanfit.vae.tile_plan import TilePlan

GIB = 2**30
SIZES = {"480p": (832, 480), "720p": (1280, 704), "1088p": (1920, 1088)}
LOOP = ("latents", "text embeddings")
"""Causes that belong to the sampling loop, which these runs have not; their inputs are counted instead."""
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16, "f8_e4m3": torch.float8_e4m3fn}

Block = dict[str, StoredWeight]


def zero_block(preset: str) -> Block:
    """Block 0 of the preset's file, all values 0, on the CPU."""
    variant, _, kind = preset.partition(":")
    shapes = transformer_tensors(**{"text_dim": 4096, "freq_dim": 256, **_SHAPES[variant]})
    formats = _formats(shapes, kind)
    block: Block = {}
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


def part_of(preset: str, block: Block, blocks: int) -> TransformerPart:
    """The preset's transformer with so many blocks like this one."""
    formats = frozenset(weight.format for weight in block.values() if len(weight.shape) == 2)
    size = BlockLayout(block).nbytes
    return dataclasses.replace(transformer_preset(preset), block_bytes=size, formats=formats, num_layers=blocks)


def latent_shape(part: TransformerPart, video: Video) -> tuple[int, int, int, int, int]:
    step = video.size_multiple // 2
    return video.batch, part.in_channels, video.latent_frames, video.height // step, video.width // step


def predicted_forward(part: TransformerPart, plan: Plan) -> int:
    """The plan's bytes for the forward that runs here: its inputs and output instead of a sampling loop's tensors."""
    stage = next(stage for stage in plan.stages if stage.name.startswith("denoise"))
    shape = latent_shape(part, plan.video)
    given = 2 * (torch.Size(shape).numel() + plan.video.batch * 512 * 4096)
    output = 2 * torch.Size(shape).numel() * part.out_channels // part.in_channels
    return stage.vram_peak - sum(stage.vram[cause] for cause in LOOP) + given + output


@torch.inference_mode()
def run_forward(
    part: TransformerPart,
    block: Block,
    plan: Plan,
    passes: int = 1,
    loras: Mapping[int, BlockPatches] | None = None,
) -> OffloadReport:
    """Forwards of the transformer as the plan says; more than one for a policy that measures.

    Returns: the store's report at the end, with the speeds by which it decided before the last forward.
    """
    device = torch.device("cuda", 0)
    video, machine = plan.video, plan.machine
    file = RepeatedFile(block, part.num_layers)
    dtype = torch.bfloat16
    patches = PatchStore(loras, device, dtype, keep=plan.keep_loras) if loras else None
    with (
        BlockStore(
            [file], device, policy=machine.policy, vram_budget=plan.weights_budget, ram_budget=64 * GIB
        ) as store,
        nullcontext() if patches is None else closing(patches),
    ):
        with init_empty_weights():
            model = LeanTransformer(
                num_attention_heads=part.num_heads, attention_head_dim=128, in_channels=part.in_channels,
                out_channels=part.out_channels, text_dim=4096, ffn_dim=part.ffn_dim, num_layers=part.num_layers,
            )  # fmt: skip
        ladder = Ladder(ForwardSettings(plan.chunk_tokens, packed_attention=plan.packed_attention), store)
        model.attach(store.source(), part.shape, ladder)
        for each in model.blocks:
            each.patches = patches
        rope = model.rope.to(device)
        state = {
            name: torch.zeros(
                parameter.shape,
                device=device,
                dtype=torch.float32 if "time_embedder" in name or "scale_shift" in name else dtype,
            )
            for name, parameter in model.named_parameters()
            if not name.startswith("blocks.")
        }
        model.load_state_dict(state, strict=False, assign=True)
        del state
        model.rope = rope
        model.eval().requires_grad_(False)
        batch = video.batch
        steps = (batch, video.tokens) if part.in_channels == 48 else (batch,)
        latents = torch.zeros(latent_shape(part, video), device=device, dtype=dtype)
        text = torch.zeros(batch, 512, 4096, device=device, dtype=dtype)
        speed = None
        for _ in range(passes):
            torch.cuda.synchronize()  # what the store has measured is then what it decides by
            speed = store.report.speed
            model(latents, torch.full(steps, 700.0, device=device), text, return_dict=False)
        if ladder.steps:
            print(f"note: the ladder went down: {ladder.steps}", flush=True)
        return dataclasses.replace(store.report, speed=speed)


@torch.inference_mode()
def run_decode(model: Model, video: Video, tiles: TilePlan) -> None:
    vae = AutoencoderKLWan(**diffusers_config(model.vae.variant))
    vae = vae.to("cuda", torch.bfloat16).eval().requires_grad_(False)
    sink = OrderedFrames(lambda *_: None)
    try:
        decode(vae, torch.zeros(decode_shape(model, video), device="cuda"), tiles, sink)
    finally:
        sink.close()


def start_libraries() -> None:
    """cuBLAS's workspace stays from its first use on, and every plan counts it: it is there before anything is
    measured."""
    torch.mm(*torch.zeros(2, 64, 64, device="cuda", dtype=torch.bfloat16).unbind())
    if torch.cuda.memory_allocated() > LIBRARIES:
        raise SystemExit(f"{torch.cuda.memory_allocated()} bytes are allocated before the first run")


@dataclass(frozen=True)
class Peak:
    """Of PyTorch's allocator, all that is in it; `before`: libraries, there when the run began."""

    allocated: int
    reserved: int
    before: int
    seconds: float


def peak(run: Callable[[], object]) -> Peak:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    seconds = round(time.perf_counter() - started, 2)
    return Peak(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), before, seconds)


@dataclass(frozen=True)
class Outcome:
    """What became of a run within a limit.

    Args:
        end: `ran`, or the error.
        shortages: how often memory was out in it: above 0 and yet `ran`, it went on with tighter settings.
        flushes: how often PyTorch first had to give back what it kept unused.
    """

    end: str
    shortages: int
    flushes: int

    @property
    def as_planned(self) -> bool:
        return self.end == "ran" and not self.shortages


def within(nbytes: int, run: Callable[[], object]) -> Outcome:
    """The run when PyTorch may have no more than `nbytes`, what libraries hold in it included."""
    torch.cuda.empty_cache()
    before = torch.cuda.memory_stats()
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.get_device_properties(0).total_memory)
    end = "ran"
    try:
        run()
        torch.cuda.synchronize()
    except (torch.OutOfMemoryError, WanFitError) as error:
        end = type(error).__name__
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    after = torch.cuda.memory_stats()
    shortages, flushes = (after[key] - before[key] for key in ("num_ooms", "num_alloc_retries"))
    return Outcome(end, shortages, flushes)
