"""What other nodes ask of the model through `transformer_options`: honoured, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from comfy.cli_args import args
from comfy.ldm.modules.attention import optimized_attention

from ...src.wanfit.blocks import AttentionBackend
from ...src.wanfit.errors import InputError

# Patches that run between blocks or outside of them: ComfyUI's own forward applies those.
_OUTSIDE_BLOCKS = frozenset(("double_block", "noise_refiner", "post_input"))


def check(options: Mapping[str, Any]) -> None:
    """Refuse what reaches into a block.

    Raises:
        InputError: patch_unsupported, naming the option.
    """
    inside = sorted(
        name for name, patches in options.get("patches", {}).items() if patches and name not in _OUTSIDE_BLOCKS
    )
    replaced = options.get("patches_replace", {})
    inside += sorted(name for name, patches in replaced.items() if patches and name != "dit")
    inside += sorted({str(key[0]) for key in replaced.get("dit", {}) if key[0] != "double_block"})
    if inside:
        raise InputError(
            "patch_unsupported",
            "denoise",
            f"another node patches {', '.join(inside)}, inside the transformer blocks, which WanFit runs itself",
            "Remove that node, or load the model with ComfyUI's own loader",
        )


def check_compiled(model_options: Mapping[str, Any]) -> None:
    """Refuse torch.compile, whether of the whole model or of its blocks.

    Raises:
        InputError: patch_unsupported.
    """
    if "torch_compile_kwargs" in model_options:  # comfy_api.torch_helpers
        raise InputError(
            "patch_unsupported",
            "denoise",
            "another node puts torch.compile (TorchCompileModel) over the transformer blocks, which WanFit runs itself "
            "with kernels of its own",
            "Remove that node, or load the model with ComfyUI's own loader",
        )


def keeps_block_input(options: Mapping[str, Any], index: int) -> bool:
    """Whether a patch may still read the block's input afterwards, so that it must not be updated in place."""
    replaced = options.get("patches_replace", {}).get("dit", {})
    return ("double_block", index) in replaced or bool(options.get("patches", {}).get("double_block"))


def attention_chosen(options: Mapping[str, Any]) -> bool:
    """Whether a start option of ComfyUI or another node chose the attention."""
    start = any(
        value for name, value in vars(args).items() if name.startswith(("use_", "force_")) and "_attention" in name
    )
    return start or "optimized_attention_override" in options


def attention_of(options: dict[str, Any]) -> AttentionBackend:
    """ComfyUI's attention function, which obeys its start options and `optimized_attention_override`."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        heads = q.shape[2]
        result = optimized_attention(q.flatten(2), k.flatten(2), v.flatten(2), heads=heads, transformer_options=options)
        return result.unflatten(2, (heads, -1))

    return attention
