"""ComfyUI's own Wan MODEL, built around the engine."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import comfy.model_detection
import comfy.model_management
import comfy.patcher_extension
import torch

from ...src.wanfit.checkpoint import TITLES, Checkpoint
from ...src.wanfit.errors import BudgetError, CheckpointError, InputError, RunError
from ...src.wanfit.quant import dequantize
from . import conditions, errors, options, resume
from .block import EngineBlock
from .patcher import EnginePatcher
from .placement import Placement
from .runtime import EngineRuntime

_PLAIN = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_KEY = "wanfit"
_WORDS = {"num_frames": "length"}
"""Of ComfyUI's nodes that make latents: while it samples, the sampler may be anyone's."""


def load_models(checkpoints: Sequence[Checkpoint], *, to_fp8: bool = False) -> list[EnginePatcher]:
    """A MODEL for each transformer; they share device and host memory. The blocks stay in their files for now.

    Args:
        to_fp8: quantise the blocks' 16- and 32-bit matrices when they are first read.

    Raises:
        InputError: pair_mismatch when a file is no transformer.
        CheckpointError: model_unsupported when this ComfyUI knows no such model.
    """
    for checkpoint in checkpoints:
        identity = checkpoint.identity
        if identity.kind != "transformer":
            raise InputError(
                "pair_mismatch",
                "load",
                f"<transformer> is a {TITLES[identity.variant]}",
                "Give a Wan transformer there",
            )
    placement = Placement(checkpoints, to_fp8=to_fp8)
    return [_load(checkpoint, placement, expert) for expert, checkpoint in enumerate(checkpoints)]


def _load(checkpoint: Checkpoint, placement: Placement, expert: int) -> EnginePatcher:
    config = comfy.model_detection.model_config_from_unet(_placeholders(checkpoint), "")
    if config is None:
        raise CheckpointError(
            "model_unsupported", "load", f"this ComfyUI does not know the model in {checkpoint.path}", "Update ComfyUI"
        )
    device = comfy.model_management.get_torch_device()
    dtype = _compute_dtype(checkpoint, config, device)
    config.set_inference_dtype(dtype, None)
    runtime = EngineRuntime(checkpoint, placement, expert, dtype)
    model = _build(config, runtime)
    model.load_model_weights(_rest(checkpoint, dtype), "")
    patcher = EnginePatcher(model, load_device=device, offload_device=comfy.model_management.unet_offload_device())
    wrappers = comfy.patcher_extension.WrappersMP
    patcher.add_wrapper_with_key(wrappers.DIFFUSION_MODEL, _KEY, runtime.forward)
    patcher.add_wrapper_with_key(wrappers.OUTER_SAMPLE, _KEY, _around_sampling)
    return patcher


def _around_sampling(executor: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Say which clone samples before ComfyUI asks for memory; give device memory back however sampling ends."""
    guider = executor.class_obj
    patcher: EnginePatcher = guider.model_patcher
    runtime = patcher.runtime
    runtime.preparing = weakref.proxy(patcher)
    try:
        with errors.in_words_of(_WORDS, "denoise"), _with_advice(patcher):
            options.check_compiled(patcher.model_options)
            conditions.check(runtime.checkpoint.identity, args[1], guider.conds)
            return executor(*args, **kwargs)
    finally:
        runtime.preparing = None
        runtime.release()


@contextmanager
def _with_advice(patcher: EnginePatcher) -> Iterator[None]:
    try:
        with errors.explained("denoise"):
            yield
    except (BudgetError, RunError) as error:
        error.add_change(resume.advice(patcher))
        raise


def _placeholders(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The model's state dict without data: what ComfyUI's detection looks at."""
    return {name: torch.empty(info.shape, device="meta") for name, info in checkpoint.tensors.items()}


def _compute_dtype(checkpoint: Checkpoint, config: Any, device: torch.device) -> torch.dtype:
    """The dtype that ComfyUI's own loader would compute in."""
    management, supported = comfy.model_management, config.supported_inference_dtypes
    stored = management.unet_dtype(
        model_params=checkpoint.identity.parameters,
        supported_dtypes=list(supported),
        weight_dtype=_PLAIN.get(next(iter(checkpoint.identity.formats))),
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
    """Everything but the blocks, in the dtypes of ComfyUI's modules: newer cores take tensors over as they are,
    so none is a view of the file."""
    rest: dict[str, torch.Tensor] = {}
    for name in checkpoint.tensors:
        if not name.startswith("blocks."):
            wanted = torch.float32 if name.startswith("patch_embedding.") else dtype
            stored = checkpoint.load(name)
            tensor = dequantize(stored, wanted)
            rest[name] = tensor.clone() if tensor.data_ptr() == stored.data.data_ptr() else tensor
    return rest


def _refuse_saving(*_: Any, **__: Any) -> Any:
    raise InputError(
        "patch_unsupported",
        "save",
        "A MODEL whose blocks WanFit holds cannot be saved",
        "Load the model with ComfyUI's own loader for that",
    )
