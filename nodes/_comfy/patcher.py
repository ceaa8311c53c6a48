"""ComfyUI's model patcher for a model whose blocks the engine holds."""

from __future__ import annotations

import math
from typing import Any

import comfy.model_patcher

from ...src.wanfit.errors import InputError
from . import lora
from .runtime import EngineRuntime


class EnginePatcher(comfy.model_patcher.ModelPatcher):
    """Refuses, by name and at once, what would need the blocks' weights as ComfyUI's own tensors."""

    @property
    def runtime(self) -> EngineRuntime:
        return self.model.wanfit_runtime

    def add_patches(self, patches: Any, strength_patch: float = 1.0, strength_model: float = 1.0) -> Any:
        if not patches:  # what core's LoRA loader hands over when no key of the file fits
            raise InputError(
                "lora_mismatch",
                "load",
                f"no tensor of the LoRA fits {self.runtime.checkpoint.path.name}: it is for another model",
                "Take a LoRA for this Wan model, or remove the LoRA node",
            )
        if not math.isfinite(strength_patch):
            raise InputError(
                "lora_invalid", "load", f"the LoRA's strength is {strength_patch}", "Use a number such as 1"
            )
        added = {}
        for key, patch in patches.items():
            name, offset, function = (key, None, None) if isinstance(key, str) else (*key, None, None)[:3]
            added[name] = [(strength_patch, patch, strength_model, offset, function)]
        known = self.model.state_dict()
        lora.collect({name: entry for name, entry in added.items() if name in known}, self.runtime.block_shapes)
        return super().add_patches(patches, strength_patch, strength_model)

    def add_hook_patches(self, hook: Any, patches: Any, *args: Any, **kwargs: Any) -> Any:
        if any(lora.block_of(key if isinstance(key, str) else key[0]) for key in patches):
            raise _refused("A LoRA that is switched on and off by a hook", "Use LoraLoaderModelOnly")
        return super().add_hook_patches(hook, patches, *args, **kwargs)

    def add_weight_wrapper(self, name: str, function: Any) -> None:
        if lora.block_of(name):
            raise _refused(f"A wrapper of the weight {name}", _USE_CORE)
        super().add_weight_wrapper(name, function)

    def add_object_patch(self, name: str, obj: Any) -> None:
        if name.startswith("diffusion_model.blocks"):
            raise _refused(f"A replacement of {name} (torch.compile, or another node's own blocks)", _USE_CORE)
        super().add_object_patch(name, obj)

    def get_key_patches(self, filter_prefix: str | None = None) -> Any:
        raise _refused("Merging, extracting or saving this MODEL", _USE_CORE)

    def detach(self, unpatch_all: bool = True) -> Any:
        if unpatch_all:
            self.runtime.release()
        return super().detach(unpatch_all)


_USE_CORE = "Load the model with ComfyUI's own loader for that"


def _refused(what: str, change: str) -> InputError:
    return InputError(
        "patch_unsupported", "load", f"{what} needs the blocks' weights, which WanFit holds itself", change
    )
