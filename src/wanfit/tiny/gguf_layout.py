"""Writes a Wan transformer as GGUF, with the mixed types of the published files.

Source: the tensor rules of llama-quantize with city96's patch for diffusion models, read off published files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from .kquants import quantize

# file type -> (LlamaFileType number, base type, type of the first so many .v.weight, of the other .v.weight, of ffn.2)
FILE_TYPES: Mapping[str, tuple[int, str, int, str, str, str]] = {
    "Q8_0": (7, "Q8_0", 0, "", "Q8_0", "Q8_0"),
    "Q6_K": (18, "Q6_K", 0, "", "Q6_K", "Q6_K"),
    "Q5_K_M": (17, "Q5_K", 0, "", "Q6_K", "Q6_K"),
    "Q5_K_S": (16, "Q5_K", 0, "", "Q5_K", "Q5_K"),
    "Q5_1": (9, "Q5_1", 0, "", "Q5_1", "Q5_1"),
    "Q5_0": (8, "Q5_0", 0, "", "Q5_0", "Q5_1"),
    "Q4_K_M": (15, "Q4_K", 0, "", "Q6_K", "Q6_K"),
    "Q4_K_S": (14, "Q4_K", 4, "Q5_K", "Q4_K", "Q5_K"),
    "Q4_1": (3, "Q4_1", 0, "", "Q4_1", "Q4_1"),
    "Q4_0": (2, "Q4_0", 0, "", "Q4_0", "Q4_1"),
    "Q3_K_L": (13, "Q3_K", 0, "", "Q5_K", "Q5_K"),
    "Q3_K_M": (12, "Q3_K", 2, "Q5_K", "Q4_K", "Q4_K"),
    "Q3_K_S": (11, "Q3_K", 0, "", "Q3_K", "Q3_K"),
    "Q2_K": (10, "Q2_K", 0, "", "Q3_K", "Q2_K"),
    "IQ4_NL": (25, "IQ4_NL", 0, "", "IQ4_NL", "IQ4_NL"),
    "IQ4_XS": (30, "IQ4_XS", 0, "", "IQ4_XS", "IQ4_XS"),
    "BF16": (32, "BF16", 0, "", "BF16", "BF16"),
    "F16": (1, "F16", 0, "", "F16", "F16"),
}
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


def tensor_types(shapes: Mapping[str, tuple[int, ...]], file_type: str, bf16_source: bool = False) -> dict[str, str]:
    """The GGUF type of each tensor of a transformer in a file of that type."""
    _, base, first, first_type, values, down = FILE_TYPES[file_type]
    early = set(list(_values(shapes))[:first])
    types: dict[str, str] = {}
    for name, shape in shapes.items():
        if name == _PATCH:
            types[name] = "F32"
        elif len(shape) != 2 or not name.startswith("blocks."):
            types[name] = ("BF16" if len(shape) == 2 else "F32") if bf16_source else "F16"
        elif name in early:
            types[name] = first_type
        elif name.endswith(".v.weight"):
            types[name] = values
        else:
            types[name] = down if name.endswith(".ffn.2.weight") else base
    return types


def _values(names: Iterable[str]) -> Iterable[str]:
    return (name for name in names if name.endswith(".v.weight"))


def _add(writer: gguf.GGUFWriter, name: str, array: np.ndarray, type_name: str) -> None:
    if type_name in ("F32", "F16"):
        writer.add_tensor(name, array.astype(np.float32 if type_name == "F32" else np.float16))
        return
    kind = gguf.GGMLQuantizationType[type_name]
    rows = quantize(array.reshape(-1, array.shape[-1]), type_name)
    writer.add_tensor(name, rows.reshape(*array.shape[:-1], -1), raw_dtype=kind)
