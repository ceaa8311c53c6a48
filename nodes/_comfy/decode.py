"""What the decode node does: the engine's exact tiled decode over ComfyUI's own VAE object."""

from __future__ import annotations

from typing import Any

import comfy.model_management
import comfy.ops
import comfy.sd
import comfy.utils
import psutil
import torch

from ...src.wanfit.errors import InputError, TilingError
from ...src.wanfit.vae.decode import decode
from ...src.wanfit.vae.passes import Step
from ...src.wanfit.vae.plan import TilePlan, plan_decode
from ...src.wanfit.vae.sinks import HostFrames

_SMALLEST_TILE = 128


def images(samples: dict[str, Any], vae: Any, tile_size: int) -> torch.Tensor:
    """Frames (B * F, H, W, 3), float32 in 0 to 1, on the CPU.

    Args:
        samples: ComfyUI's LATENT: raw VAE latents, (B, C, T, h, w).
        tile_size: edge of a tile in pixels; 0: the fewest tiles that fit.

    Raises:
        TilingError: latent_invalid, tile_invalid. BudgetError: no grid fits. CheckpointError: no Wan VAE.
    """
    latents = samples["samples"]
    if not isinstance(latents, torch.Tensor) or latents.ndim != 5:
        shape = tuple(latents.shape) if isinstance(latents, torch.Tensor) else type(latents).__name__
        raise TilingError("latent_invalid", "decode", f"<latents> is {shape}, not a video latent", "Use a Wan sampler")
    if not isinstance(vae, comfy.sd.VAE):
        raise InputError("part_unsupported", "decode", f"<vae> is a {type(vae).__name__}", "Connect Load VAE")
    model, dtype, device = vae.first_stage_model, vae.vae_dtype, vae.device
    whole = plan_decode(model, latents.shape, dtype=dtype, device=device, grid=(1, 1))
    comfy.model_management.load_models_gpu(
        [vae.patcher], memory_required=whole.memory.total - whole.memory.weights, force_full_load=True
    )
    plan = whole if tile_size == 0 else _in_tiles(model, latents, tile_size, whole)
    if tile_size == 0:
        budget = _free_bytes(device) + whole.memory.weights
        plan = plan_decode(model, latents.shape, dtype=dtype, device=device, budget_bytes=budget)
    sink = HostFrames(torch.float32, unit=True)
    decode(model, latents, plan, sink, device=device, before_step=_progress(plan), read=_weights)
    return sink.frames.flatten(0, 1)


def _in_tiles(model: Any, latents: torch.Tensor, tile_size: int, whole: TilePlan) -> TilePlan:
    if tile_size < _SMALLEST_TILE:
        raise TilingError(
            "tile_invalid", "decode", f"<grid> is {tile_size} pixels", f"Use {_SMALLEST_TILE} or more, or 0"
        )
    height, width = whole.rows[-1].core[1], whole.columns[-1].core[1]
    grid = (-(-height // tile_size), -(-width // tile_size))
    return plan_decode(model, latents.shape, dtype=whole.dtype, device=whole.device, grid=grid)


def _weights(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where ComfyUI pages weights in and out by itself (0.16 and newer, CUDA), a module's own may be elsewhere."""
    return comfy.ops.cast_bias_weight(module, x)


def _free_bytes(device: torch.device) -> int:
    if comfy.model_management.is_device_cpu(device):
        return psutil.virtual_memory().available * 4 // 5
    reserve = comfy.model_management.extra_reserved_memory()
    return max(0, int(comfy.model_management.get_free_memory(device) - reserve))


def _progress(plan: TilePlan) -> Any:
    bar = comfy.utils.ProgressBar(plan.tiles + 1)

    def before(step: Step) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        row, column = step.tile or (0, -1)
        bar.update_absolute(row * plan.grid[1] + column + 1, plan.tiles + 1)

    return before
