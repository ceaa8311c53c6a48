"""The GGUF header, read strictly.

gguf.GGUFReader is not used for reading: it trusts counts, lengths and offsets, and takes a numpy array for each
of the 256,384 tokens of a UMT5 file. Its tables of types and block sizes are used.

Source: the format description of ggml-org/ggml (docs/gguf.md), MIT.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import Any, cast

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..errors import CheckpointError, QuantError
from .mapped import MappedFile
from .raw import MAX_DIMENSIONS, MAX_HEADER_BYTES, MAX_TENSORS, RawFile, RawTensor, check_name, check_regions, damaged

MAX_ARRAY = 2**21
_WINDOW_BYTES = 2**16
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_DTYPE_NAMES = {"I8": "int8"}


def read_gguf(file: MappedFile) -> RawFile:
    """Read and check the header; no tensor data is touched.

    Shapes are logical (slowest dimension first); `comfy.gguf.orig_shape.<tensor>` overrides the stored one.

    Raises:
        CheckpointError: file_damaged, file_unsupported (version, byte order).
        QuantError: format_unknown for a type number that gguf does not know.
    """
    cursor = _Cursor(file)
    if cursor.take(4) != b"GGUF":
        raise damaged(file, f"the file does not start with GGUF but with {file.read(0, 4)!r}")
    _check_version(file, cursor.number("I"))
    tensor_count, kv_count = cursor.number("Q"), cursor.number("Q")
    if tensor_count > MAX_TENSORS or kv_count > MAX_TENSORS:
        raise damaged(file, f"the header claims {tensor_count} tensors and {kv_count} keys; the limit is {MAX_TENSORS}")
    metadata: dict[str, object] = {}
    for _ in range(kv_count):
        key = cursor.name()
        if key in metadata:
            raise damaged(file, f"the key {key} occurs twice")
        metadata[key] = cursor.value(cursor.number("I"))
    entries = [_entry(file, cursor) for _ in range(tensor_count)]
    if len({name for name, *_ in entries}) != len(entries):
        raise damaged(file, "a tensor name occurs twice")
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**20 or alignment & (alignment - 1):
        raise damaged(file, f"general.alignment is {alignment!r}, not a power of two")
    start = -(-cursor.offset // alignment) * alignment
    tensors = [_tensor(file, metadata, start, *entry) for entry in entries]
    check_regions(file, tensors, start, alignment, "GGUF")
    return RawFile("gguf", metadata, tensors)


class _Cursor:
    """Reads little-endian values one after another; never past the end of the file or of a sane header."""

    def __init__(self, file: MappedFile) -> None:
        self.file, self.offset = file, 0
        self._start, self._window = 0, b""

    def take(self, nbytes: int) -> bytes:
        end = self.offset + nbytes
        if end > self.file.size:
            raise damaged(
                self.file,
                f"the header needs {nbytes} bytes at byte {self.offset} and the file has {self.file.size} bytes",
            )
        if end > MAX_HEADER_BYTES:
            raise damaged(self.file, f"the header reaches byte {end}; the limit is {MAX_HEADER_BYTES}")
        if end > self._start + len(self._window):
            self._start, self._window = self.offset, self.file.read(self.offset, max(nbytes, _WINDOW_BYTES))
        data = self._window[self.offset - self._start : end - self._start]
        self.offset = end
        return data

    def numbers(self, kind: str, count: int) -> tuple[Any, ...]:
        return struct.unpack(f"<{count}{kind}", self.take(count * struct.calcsize("<" + kind)))

    def number(self, kind: str) -> int:
        return cast("int", self.numbers(kind, 1)[0])

    def text(self) -> str:
        # Values are kept to the byte; what is not UTF-8 shows up as surrogates.
        return self.take(self.number("Q")).decode("utf-8", "surrogateescape")

    def name(self) -> str:
        name = self.text()
        check_name(self.file, name)
        return name

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind], 1)[0]
        if kind != _ARRAY:
            raise damaged(self.file, f"unknown value type {kind} at byte {self.offset}")
        item, count = self.number("I"), self.number("Q")
        if count > MAX_ARRAY:
            raise damaged(self.file, f"an array at byte {self.offset} has {count} elements; the limit is {MAX_ARRAY}")
        if item == _STRING:
            return tuple(self.text() for _ in range(count))
        if item not in _SCALARS:
            raise damaged(self.file, f"unknown array element type {item} at byte {self.offset}")
        return self.numbers(_SCALARS[item], count)


def _check_version(file: MappedFile, version: int) -> None:
    if version in (2, 3):
        return
    if version and not version & 0xFFFF:
        what = "is a big-endian GGUF file"
    else:
        what = f"has GGUF version {version}; versions 2 and 3 are read"
    raise CheckpointError("file_unsupported", "inspect", f"{file.path} {what}", "Use a current little-endian GGUF file")


def _entry(file: MappedFile, cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name, count = cursor.name(), cursor.number("I")
    if count > MAX_DIMENSIONS:
        raise damaged(file, f"tensor {name} has {count} dimensions; the limit is {MAX_DIMENSIONS}")
    dims = cast("tuple[int, ...]", cursor.numbers("Q", count))
    if any(not 0 < d < 2**48 for d in dims):
        raise damaged(file, f"tensor {name} has the impossible dimensions {dims}")
    return name, dims, cursor.number("I"), cursor.number("Q")


def _tensor(
    file: MappedFile,
    metadata: Mapping[str, object],
    start: int,
    name: str,
    dims: tuple[int, ...],
    kind: int,
    offset: int,
) -> RawTensor:
    try:
        quant = GGMLQuantizationType(kind)
    except ValueError as error:
        raise QuantError(
            "format_unknown",
            "inspect",
            f"{file.path}: tensor {name} has the unknown GGUF type number {kind}",
            "Update WanFit, or use a file in one of the K-quants, Q8_0 or BF16",
        ) from error
    block, block_bytes = GGML_QUANT_SIZES[quant]
    row = dims[0] if dims else 1
    if row % block:
        raise damaged(
            file, f"tensor {name} has rows of {row} elements, not a multiple of the {quant.name} block of {block}"
        )
    size = math.prod(dims)
    shape = dims[::-1]
    original = metadata.get(f"comfy.gguf.orig_shape.{name}")
    if original is not None:
        whole = isinstance(original, tuple) and all(type(d) is int and d > 0 for d in original)
        if not whole or math.prod(cast("tuple[int, ...]", original)) != size:
            raise damaged(file, f"tensor {name} has {size} elements and its orig_shape says {original!r:.80}")
        shape = cast("tuple[int, ...]", original)
        if shape[-1] % block:
            raise QuantError(
                "format_unsupported",
                "inspect",
                f"{file.path}: tensor {name} of shape {shape} is stored in {quant.name} blocks of {block}, "
                "which do not divide its rows",
                "Use a file that stores this tensor as F32, F16 or BF16",
            )
    dtype = _DTYPE_NAMES.get(quant.name, quant.name.lower())
    return RawTensor(name, dtype, shape, start + offset, size // block * block_bytes, file)
