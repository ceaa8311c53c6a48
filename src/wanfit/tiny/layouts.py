"""Writes float weights under canonical names in the layouts that the community publishes Wan models in.

For tests and for `wanfit tiny`: the layouts follow the published files name by name; quantisation is plain.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import huggingface_hub
import torch
from safetensors.torch import save_file

from ..checkpoint.names import to_diffusers_transformer, to_diffusers_vae

Weights = Mapping[str, torch.Tensor]

_FP8_NAMES = {torch.float8_e4m3fn: "float8_e4m3fn", torch.float8_e5m2: "float8_e5m2"}


def write_plain(
    path: Path,
    weights: Weights,
    *,
    dtype: torch.dtype = torch.float16,
    linear_dtype: torch.dtype | None = None,
    prefix: str = "",
    diffusers_names: bool = False,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """One safetensors file without scales.

    Args:
        dtype: of all tensors.
        linear_dtype: of the linears' weights when it differs: plain fp8.
    """
    rename = _renamer(weights) if diffusers_names else str
    linears = set(linear_names(weights)) if linear_dtype is not None else set[str]()
    tensors = {
        prefix + rename(name): _cast(tensor, linear_dtype or dtype) if name in linears else tensor.to(dtype)
        for name, tensor in weights.items()
    }
    return _save(path, tensors, metadata)


def write_comfy_scaled(
    path: Path,
    weights: Weights,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    prefix: str = "",
    input_scale: float = 1.0,
    full_precision: bool = False,
    float32_marker: bool = False,
) -> Path:
    """Comfy-Org's `*_fp8_scaled`: every linear fp8 with `scale_weight` and `scale_input`, the rest F16.

    Args:
        input_scale: 1.0 is how the published files say that none was measured.
        full_precision: a marker of two elements instead of none.
        float32_marker: some files store the marker as float32, which means e4m3fn.
    """
    linears = set(linear_names(weights))
    marker_dtype = torch.float32 if float32_marker else dtype
    tensors = {f"{prefix}scaled_fp8": torch.zeros(2 if full_precision else 0).to(marker_dtype)}
    for name, tensor in weights.items():
        if name not in linears:
            tensors[prefix + name] = tensor.to(torch.float16)
            continue
        layer = prefix + name.removesuffix(".weight")
        tensors[f"{layer}.weight"], tensors[f"{layer}.scale_weight"] = scale_to_fp8(tensor, dtype)
        tensors[f"{layer}.scale_input"] = torch.tensor(input_scale)
    return _save(path, tensors)


def write_kijai_scaled(path: Path, weights: Weights, *, dtype: torch.dtype = torch.float8_e4m3fn) -> Path:
    """Kijai's `*_fp8_*_scaled_KJ`: the linears of the blocks fp8 with `scale_weight`, everything else F32."""
    tensors = {"scaled_fp8": torch.zeros(2).to(dtype)}
    linears = {name for name in linear_names(weights) if name.startswith("blocks.")}
    for name, tensor in weights.items():
        if name in linears:
            tensors[name], tensors[name.removesuffix("weight") + "scale_weight"] = scale_to_fp8(tensor, dtype)
        else:
            tensors[name] = tensor.to(torch.float32)
    return _save(path, tensors)


def write_comfy_quant(
    path: Path,
    weights: Weights,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    in_header: bool = False,
    per_row: bool = False,
    convrot_groupsize: int = 0,
    full_precision: bool = False,
    prefix: str = "",
) -> Path:
    """Comfy's newer layout: the blocks' linears with `weight_scale` and a JSON text that names the format.

    Args:
        dtype: float8_e4m3fn, float8_e5m2 or int8.
        in_header: the texts as `_quantization_metadata` of the header instead of `comfy_quant` tensors.
        per_row: int8 with one scale for each row, (out, 1), instead of one for all.
        convrot_groupsize: int8 of the matrix rotated in groups of so many columns, a power of 4; 0 for none.
    """
    config: dict[str, object] = {"format": _FP8_NAMES.get(dtype, "int8_tensorwise")}
    if convrot_groupsize:
        config |= {"convrot": True, "convrot_groupsize": convrot_groupsize}
    if full_precision:
        config["full_precision_matrix_mult"] = True
    linears = {name for name in linear_names(weights) if name.startswith("blocks.")}
    layers: dict[str, object] = {}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights.items():
        if name not in linears:
            tensors[prefix + name] = tensor.to(torch.bfloat16)
            continue
        layer = prefix + name.removesuffix(".weight")
        if convrot_groupsize:
            tensor = rotate(tensor, convrot_groupsize)
        q, scale = scale_to_int8(tensor, per_row) if dtype == torch.int8 else scale_to_fp8(tensor, dtype)
        tensors[f"{layer}.weight"], tensors[f"{layer}.weight_scale"] = q, scale
        layers[layer] = config
        if not in_header:
            text = json.dumps(config).encode()
            tensors[f"{layer}.comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
    header = {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}
    return _save(path, tensors, header if in_header else None)


def write_diffusers_folder(
    folder: Path, weights: Weights, config: Mapping[str, object], *, max_shard_size: int | str = "10GB"
) -> Path:
    """A diffusers component: config.json and the weights under diffusers' names, sharded with an index if large."""
    rename = _renamer(weights)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2), encoding="utf-8")
    _save_shards(folder, {rename(name): tensor for name, tensor in weights.items()}, max_shard_size)
    return folder


def write_original_folder(folder: Path, weights: Weights, *, max_shard_size: int | str = "10GB") -> Path:
    """A folder of the original repositories (`high_noise_model/`): shards with the original names, and an index."""
    folder.mkdir(parents=True, exist_ok=True)
    _save_shards(folder, dict(weights), max_shard_size)
    return folder


def linear_names(weights: Weights) -> Iterator[str]:
    """The weights of linears: the matrices of a transformer (VAEs have none)."""
    return (name for name, tensor in weights.items() if tensor.ndim == 2 and name.endswith(".weight"))


def scale_to_fp8(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """fp8 and one float32 scale: tensor ~ fp8 * scale."""
    scale = tensor.float().abs().amax() / torch.finfo(dtype).max
    return _cast(tensor.float() / scale, dtype), scale


def scale_to_int8(tensor: torch.Tensor, per_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 and one float32 scale, or one for each row as (out, 1)."""
    peak = tensor.float().abs().amax(1, keepdim=True) if per_row else tensor.float().abs().amax()
    scale = peak / 127
    return (tensor.float() / scale).round().clamp(-127, 127).to(torch.int8), scale


def rotate(tensor: torch.Tensor, size: int) -> torch.Tensor:
    """tensor @ H in groups of columns; H is the regular Hadamard matrix of a power of 4, its own inverse."""
    base = torch.ones(4, 4) - 2 * torch.eye(4).flip(0)
    signs = torch.ones(1, 1)
    while len(signs) < size:
        signs = torch.kron(signs, base)
    return (tensor.float().unflatten(-1, (-1, size)) @ (signs / size**0.5)).flatten(-2)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """To fp8 with saturation, which not every torch version does by itself."""
    if dtype not in _FP8_NAMES:
        return tensor.to(dtype)
    top = torch.finfo(dtype).max
    return tensor.float().clamp(-top, top).to(dtype)


def _renamer(weights: Weights) -> Callable[[str], str]:
    if "head.modulation" in weights:
        return to_diffusers_transformer
    variant = "vae-2.2" if "decoder.upsamples.0.upsamples.0.residual.2.weight" in weights else "vae-2.1"
    return lambda name: to_diffusers_vae(name, variant)


def _save(path: Path, tensors: dict[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, path, dict(metadata) if metadata else None)
    return path


def _save_shards(folder: Path, tensors: dict[str, torch.Tensor], max_shard_size: int | str) -> None:
    huggingface_hub.save_torch_state_dict(
        {n: t.contiguous() for n, t in tensors.items()},
        folder,
        filename_pattern="diffusion_pytorch_model{suffix}.safetensors",
        max_shard_size=max_shard_size,
    )
