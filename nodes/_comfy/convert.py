"""A checkpoint whose block matrices become fp8 when they are first read."""

from __future__ import annotations

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
        """By canonical name, as the file has them."""
        return self._checkpoint.tensors

    def load(self, name: str) -> StoredWeight:
        """The tensor; a block's matrix as fp8."""
        if name in self._converted:
            return self._converted[name]
        stored = self._checkpoint.load(name)
        if name.startswith("blocks.") and len(stored.shape) == 2 and stored.format in _WIDE:
            stored = self._converted[name] = to_fp8(stored)
        return stored

    def forget(self, name: str) -> None:
        """See `Checkpoint.forget`."""
        self._checkpoint.forget(name)
