"""What ComfyUI's LoRA loaders put on a patcher, in the engine's terms."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from comfy.weight_adapter import WeightAdapterBase
from comfy.weight_adapter.lora import LoRAAdapter

from ...src.wanfit.blocks import BlockPatches, LowRank
from ...src.wanfit.errors import InputError

_KEY = re.compile(r"diffusion_model\.blocks\.(\d+)\.(.+)")

# One entry of ModelPatcher.patches: (strength, patch, strength of the weight itself, offset, function).
Patch = tuple[float, Any, float, Any, Any]


def block_of(key: str) -> tuple[int, str] | None:
    """(index, name without `blocks.N.`) of a key of the model; None for one that is not of a block."""
    match = _KEY.fullmatch(key)
    return (int(match[1]), match[2]) if match else None


def collect(patches: Mapping[str, Sequence[Patch]], shapes: Mapping[str, tuple[int, ...]]) -> dict[int, BlockPatches]:
    """The patches of all blocks, checked.

    Args:
        patches: as in `ModelPatcher.patches`.
        shapes: of the blocks' tensors, by canonical name.

    Raises:
        InputError: patch_unsupported, naming kind and tensor.
    """
    found: dict[int, BlockPatches] = {}
    for key, entries in patches.items():
        place = block_of(key)
        if place is None:
            continue
        index, name = place
        block = found.setdefault(index, BlockPatches())
        for entry in entries:
            _add(block, name, entry, shapes[f"blocks.{index}.{name}"])
    return found


def _add(block: BlockPatches, name: str, entry: Patch, shape: tuple[int, ...]) -> None:
    strength, patch, strength_model, offset, function = entry
    if strength_model != 1.0:
        raise _unsupported(f"a merge that scales the model's own weight by {strength_model}", name)
    if offset is not None or function is not None:
        raise _unsupported("a patch of a part of a tensor", name)
    if isinstance(patch, LoRAAdapter):
        block.low_rank.setdefault(name.removesuffix(".weight"), []).append(_low_rank(patch, strength, name, shape))
    elif isinstance(patch, WeightAdapterBase):
        raise _unsupported(f"a patch of kind {patch.name}", name)
    else:
        block.differences.setdefault(name, []).append((strength, _difference(patch, name, shape)))


def _low_rank(adapter: LoRAAdapter, strength: float, name: str, shape: tuple[int, ...]) -> LowRank:
    up, down, alpha, middle, dora_scale, reshape = adapter.weights
    if middle is not None:
        raise _unsupported("a LoCon with a middle tensor", name)
    if dora_scale is not None:
        raise _unsupported("a DoRA", name)
    if reshape is not None:
        raise _unsupported("a LoRA that changes the shape of its tensor", name)
    if not name.endswith(".weight") or (up.shape[0], down.shape[1]) != shape or up.shape[1] != down.shape[0]:
        raise _unsupported(
            f"a LoRA of {tuple(up.shape)} and {tuple(down.shape)} for a tensor of {shape}, made for another model", name
        )
    scale = strength if alpha is None else strength * alpha / down.shape[0]
    return LowRank(down, up, float(scale))


def _difference(patch: Any, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    kind, values = ("diff", patch) if len(patch) == 1 else patch
    if kind != "diff" or isinstance(patch, list):
        raise _unsupported(f"a patch of kind {kind!r}" if isinstance(kind, str) else "a model merge", name)
    difference = values[0]
    if tuple(difference.shape) != shape:
        raise _unsupported(f"a difference of shape {tuple(difference.shape)} for a tensor of {shape}", name)
    return difference


def _unsupported(what: str, name: str) -> InputError:
    return InputError(
        "patch_unsupported",
        "load",
        f"{what} for {name} of a transformer block cannot be applied by WanFit",
        "Use a plain LoRA (up, down, alpha), or load the model with ComfyUI's own loader",
    )
