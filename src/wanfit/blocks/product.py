"""A linear's result before its LoRA, row scales and bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRankTerm:
    """inner @ up.T.

    Args:
        inner: (B * C, rank), rows dense. up: (out, rank), dense; both in the dtype of what they are added to.
    """

    inner: torch.Tensor
    up: torch.Tensor


@dataclass(frozen=True)
class Product:
    """value = (data + low_rank) * row_scale + bias; whatever reads the product next applies them in the same pass.

    Args:
        data: (B, C, out), dense, in the compute dtype; may be overwritten by its reader.
        row_scale: (B, C) float32, or None for 1.
        bias: (out,) in the compute dtype, or None when `data` has it already.
        low_rank: the LoRAs' part, or None when `data` has it already.
    """

    data: torch.Tensor
    row_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    low_rank: LowRankTerm | None = None

    def low_rank_value(self) -> torch.Tensor | None:
        """The LoRAs' part in memory of its own, (B * C, out), for a reader that adds it to `data`.

        On a card that is faster than a sum into `data`, which is read and written once more.
        """
        return None if self.low_rank is None else self.low_rank.inner @ self.low_rank.up.t()

    def value(self) -> torch.Tensor:
        """The values, in data's dtype and memory."""
        if self.low_rank is not None:
            self.data.view(-1, self.data.shape[-1]).addmm_(self.low_rank.inner, self.low_rank.up.t())
        if self.row_scale is not None:
            self.data.mul_(self.row_scale.unsqueeze(-1))
        if self.bias is not None:
            self.data.add_(self.bias)
        return self.data
