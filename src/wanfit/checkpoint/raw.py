"""What the header of one model file says, before anyone asks which model it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import CheckpointError
from .mapped import MappedFile

MAX_HEADER_BYTES = 64 * 2**20
"""The largest real header is that of a UMT5 GGUF with its vocabulary: 6.4 MB."""
MAX_TENSORS = 65536
MAX_DIMENSIONS = 8
MAX_NAME = 512
TYPES: Mapping[str, torch.dtype] = {
    "f64": torch.float64,
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "f8_e4m3": torch.float8_e4m3fn,
    "f8_e5m2": torch.float8_e5m2,
    "i64": torch.int64,
    "i32": torch.int32,
    "i16": torch.int16,
    "int8": torch.int8,
}
"""What torch calls the types of a file; the others are read as bytes."""


@dataclass(frozen=True)
class RawTensor:
    """One tensor of a file: `dtype` is a key of `wanfit.quant.FORMATS` or the file's type name in lower case,
    `shape` the logical shape, `offset` counts from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    file: MappedFile

    def view(self) -> torch.Tensor:
        """The data of a tensor that is not packed in blocks, as a view of the memory map."""
        shape = self.shape if self.dtype != "f4" else (*self.shape[:-1], self.shape[-1] // 2)
        return self.file.tensor(self.offset, self.nbytes, TYPES.get(self.dtype, torch.uint8), shape)


@dataclass(frozen=True)
class RawFile:
    """The tensors and the metadata of one file, or of all shards of a folder."""

    container: str
    metadata: Mapping[str, object]
    tensors: Sequence[RawTensor]


def damaged(file: MappedFile, what: str, change: str = "Download the file again") -> CheckpointError:
    """The error for a header that contradicts itself or the file."""
    return CheckpointError("file_damaged", "inspect", f"{file.path}: {what}", change)


def check_name(file: MappedFile, name: str) -> None:
    """Names end up in messages and on terminals: they are short and printable, or the file is damaged."""
    if len(name) > MAX_NAME or not name.isprintable():
        raise damaged(file, f"the name {name[:40]!r} of {len(name)} characters is not valid")


def check_regions(file: MappedFile, tensors: Sequence[RawTensor], start: int, alignment: int, what: str) -> None:
    """Check that the tensors cover the data from `start` to the end of the file, without overlap or gap.

    Args:
        alignment: each tensor starts at a multiple of it, counted from `start`; 1 for none.
        what: name of the container, for the messages.
    """
    end, previous = start, "the header"
    for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
        expected = start + -(-(end - start) // alignment) * alignment
        if tensor.offset < expected:
            raise damaged(
                file, f"tensor {tensor.name} starts at byte {tensor.offset}, inside {previous}, which ends at {end}"
            )
        if tensor.offset > expected:
            raise damaged(
                file,
                f"{tensor.offset - expected} bytes between {previous} and tensor {tensor.name} belong to nothing",
            )
        end, previous = tensor.offset + tensor.nbytes, f"tensor {tensor.name}"
    if end > file.size:
        raise damaged(
            file,
            f"the {what} header describes {end} bytes and the file has {file.size}: {end - file.size} are missing",
            "The download was cut off: download the file again",
        )
    padded = start + -(-(end - start) // alignment) * alignment
    if file.size > max(end, padded):
        raise damaged(file, f"{file.size - end} bytes after the last tensor belong to nothing")
