"""A tensor exactly as its file stores it. The common currency of checkpoint, quant, offload and blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class StoredWeight:
    """One tensor in its stored bytes, with all that is needed to read it.

    Args:
        format: key of `wanfit.quant.FORMATS`: `f32`, `f16`, `bf16`, `f8_e4m3`, `f8_e5m2`, `int8`, `q8_0`, `q4_k` ...
        shape: logical shape, as the model sees it: (out, in) for a linear.
        data: float formats: typed tensor of `shape`; int8: int8 of `shape`; GGUF types: uint8 (rows, row_bytes),
            where rows is the product of all dimensions but the last. Often a read-only view of a memory map.
        params: scales and the like, by role: `scale` (per tensor [], per row [out] or [out, 1]), `input_scale` ...
        options: from the file: `full_precision_matmul` (bool), `convrot_groupsize` (int) ...
    """

    format: str
    shape: tuple[int, ...]
    data: torch.Tensor
    params: Mapping[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])
    options: Mapping[str, bool | int | str] = field(default_factory=dict[str, bool | int | str])

    @property
    def nbytes(self) -> int:
        """Bytes of the data and its params, as stored."""
        return sum(t.numel() * t.element_size() for t in (self.data, *self.params.values()))

    @property
    def device(self) -> torch.device:
        return self.data.device

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> StoredWeight:
        """The same stored bytes on another device; itself when it is there already."""
        target = torch.device(device)
        if self.data.device == target:
            return self
        return dataclasses.replace(
            self,
            data=self.data.to(target, non_blocking=non_blocking),
            params={k: v.to(target, non_blocking=non_blocking) for k, v in self.params.items()},
        )
