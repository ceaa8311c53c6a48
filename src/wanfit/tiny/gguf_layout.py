"""Writes a Wan transformer as GGUF, with the mixed types of the published files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from ..checkpoint.gguf_types import FILE_TYPES, tensor_types
from .kquants import quantize

_PATCH = "patch_embedding.weight"


def write_gguf(
    path: Path,
    weights: Mapping[str, torch.Tensor],
    file_type: str = "Q4_K_M",
    *,
    bf16_source: bool = False,
    architecture: str = "wan",
    flat_patch_embedding: bool = False,
    patch_embedding: bool = True,
    name: str = "",
) -> Path:
    """A Wan transformer as QuantStack and city96 publish it.

    Args:
        weights: float tensors under canonical names.
        file_type: key of `FILE_TYPES`: the base type; single tensors differ.
        bf16_source: what is not quantised comes from a bf16 model (1-D and modulation F32, matrices BF16)
            instead of an fp16 one (all F16).
        architecture: `general.architecture`; some converters write pig, cow or nothing (empty).
        flat_patch_embedding: stored as a matrix, with `comfy.gguf.orig_shape.patch_embedding.weight`.
        patch_embedding: False leaves it out, as raw quantisations do before the 5-D fix.
        name: `general.name`; empty for none, as in the published files.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, architecture)  # writes no key for an empty one
    writer.add_quantization_version(2)
    writer.add_file_type(FILE_TYPES[file_type][0])
    if name:
        writer.add_name(name)
    types = tensor_types({n: tuple(t.shape) for n, t in weights.items()}, file_type, bf16_source)
    for tensor_name in (*(n for n in weights if n != _PATCH), _PATCH):
        if tensor_name == _PATCH and not patch_embedding:
            continue
        array = weights[tensor_name].float().numpy()
        if tensor_name == _PATCH and flat_patch_embedding:
            writer.add_array(f"comfy.gguf.orig_shape.{_PATCH}", list(array.shape))
            array = array.reshape(len(array), -1)
        _add(writer, tensor_name, array, types[tensor_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, type_name: str) -> None:
    if type_name in ("F32", "F16"):
        writer.add_tensor(name, array.astype(np.float32 if type_name == "F32" else np.float16))
        return
    kind = gguf.GGMLQuantizationType[type_name]
    rows = quantize(array.reshape(-1, array.shape[-1]), type_name)
    writer.add_tensor(name, rows.reshape(*array.shape[:-1], -1), raw_dtype=kind)
