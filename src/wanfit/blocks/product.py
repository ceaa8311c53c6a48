"""A linear's result before its row scales and bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Product:
    """value = data * row_scale + bias; whatever reads the product next applies them in the same pass.

    Args:
        data: (B, C, out), dense, in the compute dtype; may be overwritten by its reader.
        row_scale: (B, C) float32, or None for 1.
        bias: (out,) in the compute dtype, or None when `data` has it already.
    """

    data: torch.Tensor
    row_scale: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """The values, in data's dtype and memory."""
        if self.row_scale is not None:
            self.data.mul_(self.row_scale.unsqueeze(-1))
        if self.bias is not None:
            self.data.add_(self.bias)
        return self.data
