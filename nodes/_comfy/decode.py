"""What the decode nodes do: the engine's exact tiled decode over ComfyUI's own VAE object."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import comfy.model_management
import comfy.ops
import comfy.sd
import comfy.utils
import folder_paths
import psutil
import torch
from safetensors.torch import save_file

from ...src.wanfit.errors import BudgetError, InputError, RunError, TilingError
from ...src.wanfit.memory.alarm import Alarm
from ...src.wanfit.memory.record import PlannedPeak
from ...src.wanfit.vae.adapters import describe
from ...src.wanfit.vae.decode import decode
from ...src.wanfit.vae.passes import Step
from ...src.wanfit.vae.plan import TilePlan, plan_decode
from ...src.wanfit.vae.sinks import FrameSink, HostFrames
from ...src.wanfit.vae.windows import decoded_size
from . import errors
from .prompt_record import RECORDER

_SMALLEST_TILE = 128


def images(samples: dict[str, Any], vae: Any, tile_size: int, node_id: str) -> torch.Tensor:
    """Frames (B * F, H, W, 3), float32 in 0 to 1, on the CPU.

    Args:
        samples: ComfyUI's LATENT: raw VAE latents, (B, C, T, h, w).
        tile_size: edge of a tile in pixels; 0: the fewest tiles that fit.

    Raises:
        TilingError: latent_invalid, tile_invalid. BudgetError: no grid fits. CheckpointError: no Wan VAE.
        RunError: run_failed, memory_low.
    """
    with latent_kept(samples, node_id):
        latents = checked(samples, vae)
        if tile_size:
            plan = _in_tiles(vae, latents, tile_size)
            load(vae, plan)
        else:
            plan = fitting(vae, latents)
        sink = HostFrames(torch.float32, unit=True)
        run(vae, latents, plan, sink)
        return sink.frames.flatten(0, 1)


def checked(samples: dict[str, Any], vae: Any) -> torch.Tensor:
    """The latents.

    Raises: TilingError latent_invalid, InputError part_unsupported.
    """
    latents = samples["samples"]
    if not isinstance(latents, torch.Tensor) or latents.ndim != 5:
        shape = tuple(latents.shape) if isinstance(latents, torch.Tensor) else type(latents).__name__
        raise TilingError("latent_invalid", "decode", f"<latents> is {shape}, not a video latent", "Use a Wan sampler")
    if not isinstance(vae, comfy.sd.VAE):
        raise InputError("part_unsupported", "decode", f"<vae> is a {type(vae).__name__}", "Connect Load VAE")
    return latents


def fitting(vae: Any, latents: torch.Tensor, budget_bytes: int = 0) -> TilePlan:
    """The plan within the budget (0: what is free), with the VAE loaded.

    Raises: BudgetError budget_exceeded, TilingError latent_invalid.
    """
    model, dtype, device = vae.first_stage_model, vae.vae_dtype, vae.device
    most = plan_decode(model, latents.shape, dtype=dtype, device=device, grid=(1, 1))
    if budget_bytes:
        most = plan_decode(model, latents.shape, dtype=dtype, device=device, budget_bytes=budget_bytes)
    load(vae, most)
    room = _free_bytes(device) + most.memory.weights
    if budget_bytes and room >= most.memory.total:
        return most
    return plan_decode(model, latents.shape, dtype=dtype, device=device, budget_bytes=room)


def load(vae: Any, plan: TilePlan) -> None:
    """Have the core put the VAE on its device, and make room for the plan."""
    comfy.model_management.load_models_gpu(
        [vae.patcher], memory_required=plan.memory.total - plan.memory.weights, force_full_load=True
    )


def run(vae: Any, latents: torch.Tensor, plan: TilePlan, sink: FrameSink, spool_directory: Path | None = None) -> None:
    """Decode into the sink, with ComfyUI's progress bar, cancel and weights."""
    needed = plan.memory.total
    on_card = vae.device.type == "cuda"
    RECORDER.expect(PlannedPeak(needed, needed, 0) if on_card else PlannedPeak(0, 0, needed))
    decode(
        vae.first_stage_model,
        latents,
        plan,
        sink,
        device=vae.device,
        spool_directory=spool_directory,
        before_step=_progress(plan, Alarm(vae.device)),
        read=_weights,
    )


@contextmanager
def latent_kept(samples: dict[str, Any], node_id: str) -> Iterator[None]:
    """When memory was not enough in the `with` body, the latent is kept in a file, which the error names."""
    try:
        with errors.explained("decode"):
            yield
    except (BudgetError, RunError) as error:
        error.add_change(f"The latent is kept: LoadLatent offers {keep(samples, node_id)}")
        raise


def keep(samples: dict[str, Any], node_id: str) -> str:
    """Write latents whose decode failed where core's LoadLatent finds them; returns the file's name.

    One file for each node: the next one takes its place.
    """
    name = f"wanfit_decode_{''.join(letter if letter.isalnum() else '_' for letter in node_id)}.latent"
    target = Path(folder_paths.get_input_directory()) / name
    unfinished = target.with_suffix(".part")
    latents = samples["samples"].detach().cpu().contiguous()
    save_file({"latent_tensor": latents, "latent_format_version_0": torch.tensor([])}, unfinished)
    unfinished.replace(target)
    return name


def _in_tiles(vae: Any, latents: torch.Tensor, tile_size: int) -> TilePlan:
    if tile_size < _SMALLEST_TILE:
        raise TilingError(
            "tile_invalid", "decode", f"<grid> is {tile_size} pixels", f"Use {_SMALLEST_TILE} or more, or 0"
        )
    model, dtype, device = vae.first_stage_model, vae.vae_dtype, vae.device
    plan_decode(model, latents.shape, dtype=dtype, device=device, grid=(1, 1))  # refuses latents of another VAE
    _, height, width = decoded_size(describe(model), latents.shape)
    grid = (-(-height // tile_size), -(-width // tile_size))
    return plan_decode(model, latents.shape, dtype=dtype, device=device, grid=grid)


def _weights(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where ComfyUI pages weights in and out by itself (0.16 and newer, CUDA), a module's own may be elsewhere."""
    return comfy.ops.cast_bias_weight(module, x)


def _free_bytes(device: torch.device) -> int:
    if comfy.model_management.is_device_cpu(device):
        return psutil.virtual_memory().available * 4 // 5
    reserve = comfy.model_management.extra_reserved_memory()
    return max(0, int(comfy.model_management.get_free_memory(device) - reserve))


def _progress(plan: TilePlan, alarm: Alarm) -> Any:
    bar = comfy.utils.ProgressBar(plan.tiles + 1)

    def before(step: Step) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        alarm.between_tiles()
        row, column = step.tile or (0, -1)
        bar.update_absolute(row * plan.grid[1] + column + 1, plan.tiles + 1)

    return before
