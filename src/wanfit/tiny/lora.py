"""Tiny LoRA files in every dialect that trainers and converters write."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..checkpoint.names import to_diffusers_transformer


def _diffusers(module: str) -> str:
    if module.endswith("modulation"):
        return to_diffusers_transformer(module)
    return to_diffusers_transformer(f"{module}.weight").removesuffix(".weight")


# How a module is spelled, and what its down and up tensors are called.
DIALECTS: Mapping[str, tuple[Callable[[str], str], str, str]] = {
    "diffusion_model": (lambda m: f"diffusion_model.{m}", ".lora_down.weight", ".lora_up.weight"),
    "diffusion_model, PEFT": (lambda m: f"diffusion_model.{m}", ".lora_A.weight", ".lora_B.weight"),
    "model.diffusion_model": (lambda m: f"model.diffusion_model.{m}", ".lora_down.weight", ".lora_up.weight"),
    "bare": (lambda m: m, ".lora_A.default.weight", ".lora_B.default.weight"),
    "diffusers": (lambda m: f"transformer.{_diffusers(m)}", ".lora_A.weight", ".lora_B.weight"),
    "base_model": (lambda m: f"base_model.model.{m}", ".lora_A.weight", ".lora_B.weight"),
    "base_model, diffusers": (lambda m: f"base_model.model.{_diffusers(m)}", ".lora_A.weight", ".lora_B.weight"),
    "kohya": (lambda m: f"lora_unet_{m.replace('.', '_')}", ".lora_down.weight", ".lora_up.weight"),
    "kohya, diffusers": (
        lambda m: f"lora_unet_{_diffusers(m).replace('.', '_')}", ".lora_down.weight", ".lora_up.weight",
    ),
    "Fun": (lambda m: f"lora_unet__{m.replace('.', '_')}", ".lora_down.weight", ".lora_up.weight"),
}  # fmt: skip
KINDS = ("low rank", "diff", "diff_b", "diff_m")


def lora_tensors(
    weights: Mapping[str, torch.Tensor],
    *,
    dialect: str = "diffusion_model",
    kinds: tuple[str, ...] = ("low rank",),
    rank: int = 4,
    alpha: float | None = 2.0,
    alpha_dtype: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA for a transformer.

    Args:
        weights: of the transformer, by canonical name; all that a kind can change are changed.
        dialect: key of `DIALECTS`.
        kinds: of `KINDS`: matrices and convolutions as low rank; norms (or, without "low rank", all weights),
            biases, and modulation tables as differences.
        rank: of the first linear; the following have one more each, up to 3 more.
        size: of a change, relative to the tensor.
    """
    spell, down_name, up_name = DIALECTS[dialect]
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for number, (name, weight) in enumerate(weights.items()):
        module = name.removesuffix(".weight").removesuffix(".bias")
        stored = spell(module)
        change = torch.randn(weight.shape, generator=generator) * size * weight.float().std().clamp_min(0.01)
        if name.endswith("modulation"):
            if "diff_m" in kinds:
                tensors[f"{stored.removesuffix('.modulation')}.diff_m"] = change.to(dtype)
        elif name.endswith(".bias"):
            if "diff_b" in kinds:
                tensors[f"{stored}.diff_b"] = change.to(dtype)
        elif weight.ndim >= 2 and "low rank" in kinds:
            own = rank + number % 4
            columns, rows = math.prod(weight.shape[1:]), weight.shape[0]
            ones = [1] * (weight.ndim - 2)
            scale = size * float(weight.float().std()) / math.sqrt(own) * (own / alpha if alpha else 1.0)
            down = torch.randn(own, columns, generator=generator).reshape(own, *weight.shape[1:])
            tensors[stored + down_name] = down.to(dtype)
            tensors[stored + up_name] = (torch.randn(rows, own, *ones, generator=generator) * scale).to(dtype)
            if alpha is not None:
                tensors[f"{stored}.alpha"] = torch.tensor(alpha).to(alpha_dtype)
        elif "diff" in kinds:
            tensors[f"{stored}.diff"] = change.to(dtype)
    return tensors


def write_lora(path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    """Write the tensors of a LoRA."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(tensors), path, dict(metadata) if metadata else None)
    return path
