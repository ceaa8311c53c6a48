"""How the tensors of one transformer block lie in one flat buffer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from ..errors import CheckpointError
from ..quant import StoredWeight

ALIGNMENT = 256
"""Bytes. What CUDA's matrix kernels like best; every dtype can be read from such an offset."""


@runtime_checkable
class StoredTensors(Protocol):
    """What the weight path needs of a checkpoint."""

    @property
    def tensors(self) -> Mapping[str, object]:
        """By canonical name; only the names are used."""
        ...

    def load(self, name: str) -> StoredWeight:
        """A view of the memory-mapped file."""
        ...

    def forget(self, name: str) -> None:
        """The tensor was copied: its pages of the file need not stay in memory."""
        ...


@dataclass(frozen=True)
class _Piece:
    key: str
    role: str
    dtype: torch.dtype
    shape: torch.Size
    offset: int
    nbytes: int


class BlockLayout:
    """Offsets of a block's tensors, params included, in a flat uint8 buffer.

    A block travels in one copy, and its tensors are views of the buffer that it lands in.

    Args:
        weights: as the file stores them; only shapes, dtypes and options are kept.
    """

    def __init__(self, weights: Mapping[str, StoredWeight]) -> None:
        self._templates = {key: weight.to("meta") for key, weight in weights.items()}
        pieces: list[_Piece] = []
        offset = 0
        for key, weight in weights.items():
            for role, tensor in (("", weight.data), *weight.params.items()):
                nbytes = tensor.numel() * tensor.element_size()
                pieces.append(_Piece(key, role, tensor.dtype, tensor.shape, offset, nbytes))
                offset += -(-nbytes // ALIGNMENT) * ALIGNMENT
        self._pieces = tuple(pieces)
        self.nbytes = offset

    def write(self, weights: Mapping[str, StoredWeight], buffer: torch.Tensor) -> None:
        """Copy the stored bytes of `weights` into `buffer`, uint8 of at least `nbytes` on the CPU."""
        for piece in self._pieces:
            weight = weights[piece.key]
            tensor = weight.params[piece.role] if piece.role else weight.data
            raw = tensor.contiguous().reshape(-1).view(torch.uint8)
            buffer[piece.offset : piece.offset + piece.nbytes].copy_(raw)

    def view(self, buffer: torch.Tensor) -> dict[str, StoredWeight]:
        """The block's weights as views of `buffer`, on its device."""
        parts: dict[str, dict[str, torch.Tensor]] = {key: {} for key in self._templates}
        for piece in self._pieces:
            raw = buffer[piece.offset : piece.offset + piece.nbytes]
            parts[piece.key][piece.role] = raw.view(piece.dtype).view(piece.shape)
        return {
            key: dataclasses.replace(template, data=parts[key].pop(""), params=parts[key])
            for key, template in self._templates.items()
        }


class Blocks(Protocol):
    """Blocks that can be read, each into one buffer."""

    @property
    def layouts(self) -> Sequence[BlockLayout]: ...

    @property
    def largest(self) -> int:
        """Bytes of the largest block."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int, buffer: torch.Tensor) -> None:
        """Copy block `index` into `buffer`."""
        ...

    def forget(self, index: int) -> None:
        """Block `index` will not be read again soon."""
        ...


class BlockFile:
    """The blocks of one checkpoint: names, layouts, reading."""

    def __init__(self, checkpoint: StoredTensors) -> None:
        self._checkpoint = checkpoint
        names: dict[int, dict[str, str]] = {}
        for name in checkpoint.tensors:
            if name.startswith("blocks."):
                _, index, key = name.split(".", 2)
                names.setdefault(int(index), {})[key] = name
        if not names or sorted(names) != list(range(len(names))):
            raise CheckpointError(
                "tensors_missing",
                "load",
                f"The file holds the transformer blocks {sorted(names)}, which are not 0, 1, 2 ...",
                "Download the file again, or take another one",
            )
        self._names = [names[index] for index in range(len(names))]
        self.layouts = [BlockLayout(self._load(index)) for index in range(len(names))]

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def largest(self) -> int:
        """Bytes of the largest block."""
        return max(layout.nbytes for layout in self.layouts)

    def _load(self, index: int) -> dict[str, StoredWeight]:
        return {key: self._checkpoint.load(name) for key, name in self._names[index].items()}

    def read(self, index: int, buffer: torch.Tensor) -> None:
        """Copy block `index` from the file into `buffer`; the pages come from disk or the system's cache."""
        self.layouts[index].write(self._load(index), buffer)

    def forget(self, index: int) -> None:
        """Take the block's pages of the file out of the process's memory."""
        for name in self._names[index].values():
            self._checkpoint.forget(name)
