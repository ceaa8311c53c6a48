"""What the policy node does."""

from __future__ import annotations

from typing import Any

import comfy.sd

from ...src.wanfit.errors import InputError
from . import checks
from .no_model import NoModel
from .patcher import EnginePatcher
from .policy import MODES, Policy
from .runtime import POLICY_KEY

_GIB = 2**30


def with_policy(
    model: Any, model_low: Any, mode: str, vram_gib: float, ram_gib: float, attention: str, fp8_matmul: bool
) -> tuple[Any, Any]:
    """Clones of the models with that policy; a `NoModel` for a missing `model_low`.

    Raises:
        InputError: part_unsupported for a MODEL that is not WanFit's; number_invalid for a budget below the floor.
    """
    checks.one_of("policy", mode, MODES)
    budgets = {"vram_budget": vram_gib, "ram_budget": ram_gib}
    checks.finite(budgets, unit=" GiB", change="Use a number, or 0 for what is free")
    policy = Policy(mode, int(vram_gib * _GIB), int(ram_gib * _GIB), attention, fp8_matmul)
    low = NoModel("<model_low> of WanFitOffloadPolicy is not connected", "Connect it there, or use model")
    if model_low is not None:
        low = _apply(model_low, policy, "transformer_2")
    return _apply(model, policy, "transformer"), low


def _apply(model: Any, policy: Policy, role: str) -> Any:
    if not isinstance(model, EnginePatcher):
        raise InputError(
            "part_unsupported",
            "load",
            f"<{role}> is a {type(model.model).__name__} of ComfyUI's own loader",
            "Connect a MODEL from WanFitLoader; for others ComfyUI's own memory management applies",
        )
    if policy.mode == "native":
        return _native(model, role)
    floor = model.runtime.floor_bytes()
    if policy.vram_bytes and policy.vram_bytes < floor:
        raise InputError(
            "number_invalid",
            "plan",
            f"<vram_budget> is {policy.vram_bytes / _GIB:.2f} GiB; the smallest that can work for this model is "
            f"{floor / _GIB:.2f} GiB, before any pixel",
            "Raise <vram_budget>, or give 0 for what is free",
        )
    placed = model.clone()
    placed.set_attachments(POLICY_KEY, policy)
    return placed


def _native(model: EnginePatcher, role: str) -> Any:
    checkpoint = model.runtime.checkpoint
    if model.patches or model.object_patches:
        raise InputError(
            "part_unsupported",
            "load",
            f"<{role}> already has LoRAs or other patches, which the policy native cannot take over",
            "Put the policy node right after WanFitLoader",
        )
    if checkpoint.container != "safetensors":
        raise InputError(
            "format_unsupported",
            "load",
            f"{checkpoint.path.name} is a {checkpoint.container} file, which ComfyUI's own loader cannot read",
            "Choose auto, resident or stream for it",
        )
    return comfy.sd.load_diffusion_model(str(checkpoint.path))
