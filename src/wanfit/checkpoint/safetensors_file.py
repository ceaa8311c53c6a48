"""The safetensors header, read strictly.

Source: the format description of huggingface/safetensors, Apache-2.0.
"""

from __future__ import annotations

import json
import math
from typing import Any, TypeGuard, cast

from ..errors import QuantError
from .mapped import MappedFile
from .raw import MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_TENSORS, RawFile, RawTensor, check_name, check_regions, damaged

# dtype name -> (format key, bits)
DTYPES: dict[str, tuple[str, int]] = {
    "F64": ("f64", 64),
    "F32": ("f32", 32),
    "F16": ("f16", 16),
    "BF16": ("bf16", 16),
    "F8_E4M3": ("f8_e4m3", 8),
    "F8_E5M2": ("f8_e5m2", 8),
    "F8_E8M0": ("f8_e8m0", 8),
    "F6_E2M3": ("f6_e2m3", 6),
    "F6_E3M2": ("f6_e3m2", 6),
    "F4": ("f4", 4),
    "C64": ("c64", 64),
    "I64": ("i64", 64),
    "U64": ("u64", 64),
    "I32": ("i32", 32),
    "U32": ("u32", 32),
    "I16": ("i16", 16),
    "U16": ("u16", 16),
    "I8": ("int8", 8),
    "U8": ("u8", 8),
    "BOOL": ("bool", 8),
}


def read_safetensors(file: MappedFile) -> RawFile:
    """Read and check the header; no tensor data is touched.

    Raises:
        CheckpointError: file_damaged, with the numbers that contradict each other.
        QuantError: format_unknown for a dtype that is not in `DTYPES`.
    """
    header, start = _header(file)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise damaged(file, "__metadata__ is not an object")
    if len(header) > MAX_TENSORS:
        raise damaged(file, f"the header lists {len(header)} tensors; the limit is {MAX_TENSORS}")
    tensors = [_tensor(file, name, entry, start) for name, entry in header.items()]
    check_regions(file, tensors, start, 1, "safetensors")
    return RawFile("safetensors", cast("dict[str, object]", metadata), tensors)


def _header(file: MappedFile) -> tuple[dict[str, Any], int]:
    if file.size < 10:
        raise damaged(file, f"the file has {file.size} bytes, too few for a safetensors header")
    length = int.from_bytes(file.read(0, 8), "little")
    if length > file.size - 8:
        raise damaged(file, f"the header is said to be {length} bytes long and the file has {file.size} bytes in all")
    if length > MAX_HEADER_BYTES:
        raise damaged(file, f"the header is {length} bytes long; the limit is {MAX_HEADER_BYTES}")
    try:
        header = json.loads(file.read(8, length).decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise damaged(file, f"the safetensors header is not valid JSON ({str(error)[:120]})") from error
    if not isinstance(header, dict):
        raise damaged(file, "the safetensors header is not a JSON object")
    return cast("dict[str, Any]", header), 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _tensor(file: MappedFile, name: str, entry: Any, start: int) -> RawTensor:
    check_name(file, name)
    if not isinstance(entry, dict):
        raise damaged(file, f"the entry of tensor {name} is not an object")
    fields = cast("dict[str, Any]", entry)
    dtype, shape, span = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or not _whole_numbers(shape) or not _whole_numbers(span) or len(span) != 2:
        raise damaged(file, f"tensor {name} lacks a valid dtype, shape or data_offsets")
    if dtype not in DTYPES:
        raise QuantError(
            "format_unknown",
            "inspect",
            f"{file.path}: tensor {name} has the unknown dtype {dtype!r}",
            "Use a bf16, fp16, fp8 or GGUF file of the model",
        )
    if len(shape) > MAX_DIMENSIONS or any(d >= 2**48 for d in shape):
        raise damaged(file, f"tensor {name} has the impossible shape {shape[:16]}")
    begin, end = span
    key, bits = DTYPES[dtype]
    nbytes = -(-math.prod(shape) * bits // 8)
    if end - begin != nbytes:
        raise damaged(
            file, f"tensor {name} {shape} of {dtype} needs {nbytes} bytes and the header gives it {end - begin}"
        )
    return RawTensor(name, key, tuple(shape), start + begin, nbytes, file)


def _whole_numbers(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in cast("list[Any]", value))
