"""What the plan node does: the engine's plan of the connected model, or of one by name."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import comfy.model_management
import psutil
import torch

from ...src.wanfit.checkpoint import check_pair
from ...src.wanfit.errors import InputError
from ...src.wanfit.memory.advice import Search, nearest
from ...src.wanfit.memory.machine import GIB, Machine, stated_machine, this_machine
from ...src.wanfit.memory.parts import Model, transformer_part
from ...src.wanfit.memory.plan import Options, make_plan
from ...src.wanfit.memory.plan_chart import draw_plan
from ...src.wanfit.memory.presets import parts_of, text_preset, vae_preset
from ...src.wanfit.memory.report import plan_lines
from . import lora
from .patcher import EnginePatcher
from .picture import image_of


@dataclass(frozen=True)
class Wanted:
    """The node's inputs. `vram` and `ram` in GiB, 0 for this machine."""

    preset: str
    width: int
    height: int
    length: int
    policy: Any
    vram: float
    ram: float
    keep: Any
    model: Any = None
    model_low: Any = None
    batch_size: int = 1
    packed: bool = False


@dataclass(frozen=True)
class Planned:
    """What comes out. `chart`: (1, H, W, 3) in 0 to 1."""

    report: str
    chart: torch.Tensor
    fits: bool
    width: int
    height: int
    length: int


def make(wanted: Wanted, *, adapt: bool) -> Planned:
    """The plan of what is wanted, or with `adapt` of the nearest settings that fit.

    Raises: InputError: size_invalid, frames_invalid, number_invalid, pair_mismatch.
    """
    model, machine = _model(wanted), _machine(wanted)
    options = Options(loras=_loras(wanted), batch=wanted.batch_size, packed_attention=wanted.packed)
    size = wanted.width, wanted.height, wanted.length
    plan = make_plan(model, machine, *size, options)
    lines = [f"{model.variant.title}: {' + '.join(part.name for part in model.transformers)}"]
    ways = [] if plan.fits else nearest(Search(model, machine, options), *size, wanted.keep)
    if adapt and ways:
        lines.append(f"{wanted.width}x{wanted.height}, {wanted.length} frames does not fit: {plan.reason}")
        lines.append(f"adapted to {ways[0].describe()}")
        plan = ways[0].plan
    lines += plan_lines(plan)
    lines += [f"what fits: {way.describe()} ({way.plan.verdict})" for way in ways]
    if not plan.fits and not ways:
        lines.append("what fits: nothing of use at any size; take a smaller file (Q4_K_M, fp8) or more memory")
    chart, video = image_of(partial(draw_plan, plan)), plan.video
    return Planned("\n".join(lines), chart, plan.fits, video.width, video.height, video.num_frames)


def _model(wanted: Wanted) -> Model:
    if wanted.model is None:
        if wanted.model_low is not None:
            raise InputError(
                "part_missing", "plan", "<transformer_2> is connected and <transformer> is not", "Connect <transformer>"
            )
        transformers, text, vae = parts_of(wanted.preset)
        return Model(tuple(transformers), text, vae)
    given = [wanted.model] if wanted.model_low is None else [wanted.model, wanted.model_low]
    for name, model in zip(("transformer", "transformer_2"), given, strict=False):
        if not isinstance(model, EnginePatcher):
            raise InputError(
                "pair_mismatch",
                "plan",
                f"<{name}> is not from WanFit Load Wan Model, so that its file is not known",
                "Connect a MODEL of that loader, or none and choose a preset",
            )
    checkpoints = [model.runtime.checkpoint for model in given]
    if len(checkpoints) == 2:
        check_pair(checkpoints[0].identity, checkpoints[1].identity)
    parts = [transformer_part(checkpoint) for checkpoint in checkpoints]
    model = Model(tuple(parts), text_preset(), vae_preset("vae-2.1"))
    if len(parts) == 1 and model.variant.has_experts:
        parts *= 2
    return Model(tuple(parts), text_preset(), vae_preset(model.variant.vae))


def _loras(wanted: Wanted) -> tuple[int, int]:
    """Bytes of the LoRAs on the MODEL that has most of them, and of its largest block."""
    sizes = [(0, 0)]
    for model in (wanted.model, wanted.model_low):
        if model is not None:
            runtime = model.runtime
            blocks = lora.collect(model.patches, runtime.block_shapes).values()
            each = [block.nbytes(runtime.dtype) for block in blocks]
            sizes.append((sum(each), max(each, default=0)))
    return max(sizes)


def _machine(wanted: Wanted) -> Machine:
    device = comfy.model_management.get_torch_device()
    cuda = device.type == "cuda"
    if wanted.vram:
        capability = torch.cuda.get_device_capability(device) if cuda else None
        ram = wanted.ram or psutil.virtual_memory().total / GIB
        machine = stated_machine(wanted.vram, ram, capability=capability, policy=wanted.policy)
        return dataclasses.replace(machine, fused=this_machine(device, machine.dtype, machine.dtype).fused)
    if not cuda:
        return this_machine(device, torch.float32, torch.float32, text="cpu", policy=wanted.policy)
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    loaded = comfy.model_management.current_loaded_models
    held = sum(int(entry.model_loaded_memory()) for entry in loaded if entry.device == device)
    free = int(comfy.model_management.get_free_memory(device)) - int(comfy.model_management.extra_reserved_memory())
    return this_machine(device, dtype, dtype, policy=wanted.policy, vram_budget=max(0, free + held))
