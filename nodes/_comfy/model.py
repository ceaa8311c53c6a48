"""ComfyUI's own Wan MODEL, built around the engine."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import comfy.model_detection
import comfy.model_management
import torch

from ...src.wanfit.checkpoint import Checkpoint, open_checkpoint
from ...src.wanfit.errors import CheckpointError, InputError
from ...src.wanfit.quant import dequantize
from .block import EngineBlock
from .patcher import EnginePatcher
from .runtime import EngineRuntime

_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


def load_model(path: Path) -> EnginePatcher:
    """The MODEL of a transformer file. The blocks stay in the file; only the small rest is read.

    Raises:
        CheckpointError: as `open_checkpoint`, or model_unsupported when this ComfyUI knows no such model.
        InputError: pair_mismatch when the file is no transformer.
    """
    checkpoint = open_checkpoint(path)
    if checkpoint.identity.kind != "transformer":
        raise InputError("pair_mismatch", "load", f"{path} is a {checkpoint.identity.title}", "Give a Wan transformer")
    config = comfy.model_detection.model_config_from_unet(_placeholders(checkpoint), "")
    if config is None or not hasattr(config, "set_inference_dtype"):
        raise CheckpointError(
            "model_unsupported", "load", f"this ComfyUI does not know the model in {path}", "Update ComfyUI"
        )
    device = comfy.model_management.get_torch_device()
    dtype = _compute_dtype(checkpoint, config, device)
    config.set_inference_dtype(dtype, None)
    runtime = EngineRuntime(checkpoint, dtype)
    model = _build(config, runtime)
    model.load_model_weights(_rest(checkpoint, dtype), "")
    return EnginePatcher(model, load_device=device, offload_device=comfy.model_management.unet_offload_device())


def _placeholders(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The model's state dict without data: what ComfyUI's detection looks at."""
    return {name: torch.empty(info.shape, device="meta") for name, info in checkpoint.tensors.items()}


def _compute_dtype(checkpoint: Checkpoint, config: Any, device: torch.device) -> torch.dtype:
    """The dtype that ComfyUI's own loader would compute in."""
    management, supported = comfy.model_management, config.supported_inference_dtypes
    formats = [name for name in checkpoint.identity.formats if name in _PLAIN]
    stored = management.unet_dtype(
        model_params=checkpoint.identity.parameters,
        supported_dtypes=list(supported),
        weight_dtype=_PLAIN[formats[0]] if formats == list(checkpoint.identity.formats)[:1] else None,
    )
    return management.unet_manual_cast(stored, device, supported) or stored


def _build(config: Any, runtime: EngineRuntime) -> Any:
    numbers = itertools.count()

    def block(cross_attn_type: str, *_: Any, **__: Any) -> EngineBlock:
        return EngineBlock(next(numbers), runtime, image_tokens=cross_attn_type == "i2v_cross_attn")

    config.unet_config["wan_attn_block_class"] = block
    try:
        model = config.get_model({}, "")
    finally:
        del config.unet_config["wan_attn_block_class"]
    runtime.attach(model)
    model.wanfit_runtime = runtime
    model.memory_required = runtime.memory_required
    model.state_dict_for_saving = _refuse_saving
    return model.to(comfy.model_management.unet_offload_device())


def _rest(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Everything but the blocks; plain tensors as stored, quantised ones in the compute dtype."""
    names = [name for name in checkpoint.tensors if not name.startswith("blocks.")]
    weights = {name: checkpoint.load(name) for name in names}
    return {name: dequantize(w, _PLAIN.get(w.format, dtype)) for name, w in weights.items()}


def _refuse_saving(*_: Any, **__: Any) -> Any:
    raise InputError(
        "patch_unsupported",
        "save",
        "A MODEL whose blocks WanFit holds cannot be saved",
        "Load the model with ComfyUI's own loader for that",
    )
