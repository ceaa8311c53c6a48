"""Puts the scales and markers of quantised safetensors files with the weights they belong to.

The dialects: old Comfy scaled fp8 (`scaled_fp8`, `scale_weight`, `scale_input`), also in Kijai's files; Comfy
quantisation as tensors (`comfy_quant`, `weight_scale` ...) or as `_quantization_metadata` in the header.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ..errors import QuantError
from .raw import RawTensor, damaged

ROLES: Mapping[str, str] = {
    "scale_weight": "scale",
    "weight_scale": "scale",
    "scale_input": "input_scale",
    "input_scale": "input_scale",
    "weight_scale_2": "scale_2",
    "pre_quant_scale": "pre_quant_scale",
    "weight_s_rel": "scale_relative",
    "weight_s_channel": "scale_channel",
    "weight_codebook": "codebook",
    "weight_zeros": "zeros",
}
"""Name of a companion tensor of a layer -> its role in StoredWeight.params."""
EXTRAS = frozenset({"spiece_model"})
_MARKER = "scaled_fp8"
_CONFIG = "comfy_quant"
_IGNORED = ("comfy_attention.config",)
# format name in the file -> (format key, stored dtypes, logical columns per stored column)
_FORMATS: Mapping[str, tuple[str, tuple[str, ...], int]] = {
    "float8_e4m3fn": ("f8_e4m3", ("f8_e4m3", "u8"), 1),
    "float8_e5m2": ("f8_e5m2", ("f8_e5m2", "u8"), 1),
    "int8_tensorwise": ("int8", ("int8",), 1),
    "mxfp8": ("mxfp8", ("f8_e4m3", "u8"), 1),
    "nvfp4": ("nvfp4", ("u8", "f4"), 2),
    "convrot_w4a4": ("convrot_w4a4", ("int8", "u8"), 2),
    "asym_w4a8_int8": ("asym_w4a8_int8", ("int8", "u8"), 2),
    "awq_w4a16": ("awq_w4a16", ("int8", "u8"), 2),
}
_SETTINGS: Mapping[str, tuple[type, str]] = {
    "full_precision_matrix_mult": (bool, "full_precision_matmul"),
    "convrot": (bool, "convrot"),
    "convrot_groupsize": (int, "convrot_groupsize"),
    "group_size": (int, "group_size"),
    "quant_group_size": (int, "quant_group_size"),
    "linear_dtype": (str, "linear_dtype"),
}
SCALED = ("f8_e4m3", "f8_e5m2", "int8")
_MAX_CONFIG_BYTES = 65536


@dataclass(frozen=True)
class StoredTensor:
    """A model tensor with the tensors that its stored bytes need to be read."""

    raw: RawTensor
    format: str
    shape: tuple[int, ...]
    params: Mapping[str, RawTensor] = field(default_factory=dict[str, RawTensor])
    options: Mapping[str, bool | int | str] = field(default_factory=dict[str, bool | int | str])

    @property
    def nbytes(self) -> int:
        """Bytes in the file, with the params."""
        return self.raw.nbytes + sum(p.nbytes for p in self.params.values())


@dataclass(frozen=True)
class Grouped:
    """Tensors by their name without prefix: those of the model, and what else the file carries for it."""

    tensors: Mapping[str, StoredTensor]
    extras: Mapping[str, RawTensor]


def group(tensors: Mapping[str, RawTensor], metadata: Mapping[str, object], prefix: str) -> Grouped:
    """Attach companions to their weights.

    Args:
        tensors: by name without `prefix`.
        metadata: of the file.
        prefix: what was stripped; layer names in the metadata may carry it.

    Raises:
        CheckpointError: file_damaged for a companion that contradicts its weight, or has none.
        QuantError: format_unknown for a format WanFit has never heard of, format_unsupported for one it knows
            and cannot read.
    """
    weights: dict[str, RawTensor] = {}
    params: dict[str, dict[str, RawTensor]] = {}
    configs = _header_configs(tensors, metadata, prefix)
    extras: dict[str, RawTensor] = {}
    marker = None
    for name, raw in tensors.items():
        layer, _, leaf = name.rpartition(".")
        if name == _MARKER:
            marker = raw
        elif name in EXTRAS:
            extras[name] = raw
        elif leaf == _CONFIG:
            _add_config(configs, layer, raw)
        elif layer and leaf in ROLES:
            if ROLES[leaf] in params.setdefault(layer, {}):
                raise damaged(raw.file, f"layer {layer} has two tensors for its {ROLES[leaf]}")
            params[layer][ROLES[leaf]] = raw
        elif not name.endswith(_IGNORED):
            weights[name] = raw
    for layer in (*params, *configs):
        if f"{layer}.weight" not in weights:
            raise damaged(
                next(iter(tensors.values())).file, f"layer {layer} has quantisation data and no weight tensor"
            )
    full_precision = marker is not None and marker.shape == (2,)
    stored: dict[str, StoredTensor] = {}
    for name, raw in weights.items():
        layer, _, leaf = name.rpartition(".")
        own = params.get(layer, {}) if leaf == "weight" else {}
        if leaf == "weight" and layer in configs:
            stored[name] = _configured(raw, configs[layer], own)
        else:
            stored[name] = _plain(raw, own, full_precision and bool(own))
    return Grouped(stored, extras)


def _header_configs(
    tensors: Mapping[str, RawTensor], metadata: Mapping[str, object], prefix: str
) -> dict[str, dict[str, Any]]:
    text = metadata.get("_quantization_metadata")
    if not isinstance(text, str) or not tensors:
        return {}
    file = next(iter(tensors.values())).file
    try:
        layers = json.loads(text)["layers"]
        configs = {str(layer).removeprefix(prefix): config for layer, config in layers.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise damaged(file, "_quantization_metadata in the header is not valid") from error
    if not all(isinstance(config, dict) for config in configs.values()):
        raise damaged(file, "_quantization_metadata in the header is not valid")
    return configs


def _add_config(configs: dict[str, dict[str, Any]], layer: str, raw: RawTensor) -> None:
    if raw.dtype != "u8" or raw.nbytes > _MAX_CONFIG_BYTES:
        raise damaged(raw.file, f"tensor {raw.name} is {raw.nbytes} bytes of {raw.dtype}, not a short JSON text")
    try:
        config = json.loads(raw.file.read(raw.offset, raw.nbytes).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise damaged(raw.file, f"tensor {raw.name} holds no valid JSON") from error
    if not isinstance(config, dict):
        raise damaged(raw.file, f"tensor {raw.name} holds no JSON object")
    if configs.setdefault(layer, config) != config:
        raise damaged(raw.file, f"tensor {raw.name} and _quantization_metadata contradict each other")


def _configured(raw: RawTensor, config: dict[str, Any], params: dict[str, RawTensor]) -> StoredTensor:
    settings = dict(config)
    name = settings.pop("format", None)
    nested = settings.pop("params", None)
    if isinstance(nested, dict):
        settings.update(cast("dict[str, Any]", nested))
    if name not in _FORMATS:
        raise _unknown(raw, f"the quantisation format {name!r:.60}")
    key, dtypes, packed = _FORMATS[name]
    if raw.dtype not in dtypes:
        raise damaged(raw.file, f"tensor {raw.name} is marked {name} and stored as {raw.dtype}")
    options: dict[str, bool | int | str] = {}
    for setting, value in settings.items():
        if setting in ("orig_dtype", "orig_shape"):
            continue
        if setting not in _SETTINGS:
            raise _unknown(raw, f"the {name} setting {setting!r:.60}")
        kind, option = _SETTINGS[setting]
        if type(value) is not kind:
            raise damaged(raw.file, f"tensor {raw.name} has {setting} = {value!r:.60}")
        options[option] = value
    if key == "int8":  # wanfit.quant rotates when there is a group size
        if options.get("convrot"):
            options.setdefault("convrot_groupsize", 256)
        else:
            options.pop("convrot_groupsize", None)
    shape = raw.shape
    if packed > 1 and raw.dtype != "f4" and shape:
        shape = (*shape[:-1], shape[-1] * packed)
    stored = StoredTensor(raw, key, shape, params, options)
    if key in SCALED:
        _check_scales(stored, required=True)
    return stored


def _plain(raw: RawTensor, params: dict[str, RawTensor], full_precision: bool) -> StoredTensor:
    if params and raw.dtype not in SCALED:
        raise QuantError(
            "format_unsupported",
            "inspect",
            f"{raw.file.path}: tensor {raw.name} has a scale and is stored as {raw.dtype}",
            "Use a bf16, fp8 or GGUF file of the model",
        )
    options: dict[str, bool | int | str] = {"full_precision_matmul": True} if full_precision else {}
    stored = StoredTensor(raw, raw.dtype, raw.shape, params, options)
    _check_scales(stored, required=raw.dtype == "int8")
    return stored


def _check_scales(stored: StoredTensor, required: bool) -> None:
    raw = stored.raw
    if required and "scale" not in stored.params:
        raise damaged(raw.file, f"tensor {raw.name} is stored as {stored.format} and has no scale")
    rows = stored.shape[:1]
    for role, param in stored.params.items():
        if role not in ("scale", "input_scale"):
            raise _unsupported(raw, f"has a {role}, which {stored.format} does not use")
        allowed = [(), (1,), (1, 1)] + ([rows, (*rows, 1)] if role == "scale" else [])
        if param.shape not in allowed or param.dtype not in ("f32", "f16", "bf16"):
            raise _unsupported(
                raw, f"{list(raw.shape)} has a {role} of shape {list(param.shape)} and dtype {param.dtype}"
            )


def _unsupported(raw: RawTensor, what: str) -> QuantError:
    return QuantError(
        "format_unsupported",
        "inspect",
        f"{raw.file.path}: tensor {raw.name} {what}",
        "Use a file with one scale per tensor or per row, a bf16 file or a GGUF file of the model",
    )


def _unknown(raw: RawTensor, what: str) -> QuantError:
    return QuantError(
        "format_unknown",
        "inspect",
        f"{raw.file.path}: tensor {raw.name} has {what}, which WanFit does not know",
        "Update WanFit, or use a bf16, fp8_scaled or GGUF file of the model",
    )
