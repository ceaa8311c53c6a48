"""A checkpoint whose block matrices become fp8 when they are first read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from ...src.wanfit.checkpoint import Checkpoint, TensorInfo
from ...src.wanfit.quant import StoredWeight
from ...src.wanfit.quant.to_fp8 import to_fp8

_WIDE = ("f32", "f16", "bf16")


class Fp8Blocks:
    """Converts each 16- or 32-bit matrix once.

    Memory: the converted blocks stay in RAM: half of a 16-bit file.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._converted: dict[str, StoredWeight] = {}

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """By canonical name, as they become."""
        return {name: _converted(info) if _converts(info) else info for name, info in self._checkpoint.tensors.items()}

    def load(self, name: str) -> StoredWeight:
        """The tensor; a block's matrix as fp8."""
        if name in self._converted:
            return self._converted[name]
        stored = self._checkpoint.load(name)
        if _converts(self._checkpoint.tensors[name]):
            stored = self._converted[name] = to_fp8(stored)
        return stored

    def forget(self, name: str) -> None:
        """See `Checkpoint.forget`."""
        self._checkpoint.forget(name)


def _converts(info: TensorInfo) -> bool:
    return info.name.startswith("blocks.") and len(info.shape) == 2 and info.format in _WIDE


def _converted(info: TensorInfo) -> TensorInfo:
    return dataclasses.replace(info, format="f8_e4m3", nbytes=math.prod(info.shape))
