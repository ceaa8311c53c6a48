"""The figures in PyTorch's out-of-memory messages."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"


@dataclass(frozen=True)
class OomFigures:
    """Bytes; None where the message has none. `allowed`: by a memory fraction of this process."""

    asked: int | None
    free: int | None
    total: int | None
    allocated: int | None
    unused: int | None
    in_use: int | None
    others: tuple[tuple[int, int], ...]
    allowed: int | None


def read_native(text: str) -> OomFigures:
    """Source: PyTorch c10/cuda/CUDACachingAllocator.cpp."""
    return OomFigures(
        asked=_find(rf"Tried to allocate {_SIZE}", text),
        free=_find(rf"of which {_SIZE} is free", text),
        total=_find(rf"total capacity of {_SIZE}", text),
        allocated=_find(rf"{_SIZE} is allocated by PyTorch", text),
        unused=_find(rf"{_SIZE} is reserved by PyTorch but unallocated", text),
        in_use=_find(rf"this process has {_SIZE} memory in use", text),
        others=tuple(
            (int(pid), int(float(number) * _UNITS[unit]))
            for pid, number, unit in re.findall(rf"Process (\d+) has {_SIZE} memory in use", text)
        ),
        allowed=_find(rf"{_SIZE} allowed", text),
    )


def read_async(text: str) -> OomFigures:
    """Source: PyTorch c10/cuda/CUDAMallocAsyncAllocator.cpp."""
    return OomFigures(
        asked=_find(rf"Requested\s*: {_SIZE}", text),
        free=_find(rf"Free \(according to CUDA\): {_SIZE}", text),
        total=_find(rf"Device limit\s*: {_SIZE}", text),
        allocated=_find(rf"Currently allocated\s*: {_SIZE}", text),
        unused=None,
        in_use=None,
        others=(),
        allowed=None,
    )


def _find(pattern: str, text: str) -> int | None:
    found = re.search(pattern, text)
    return int(float(found[1]) * _UNITS[found[2]]) if found else None
