"""LoRA as a side path of a linear: nothing is merged into the stored weight."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LowRank:
    """Adds `scale * (x @ down.T) @ up.T` to a linear's output.

    Args:
        down: (rank, in), up: (out, rank), on the linear's device, any float dtype.
        scale: strength times alpha / rank.
    """

    down: torch.Tensor
    up: torch.Tensor
    scale: float

    def add_to(self, output: torch.Tensor, x: torch.Tensor) -> None:
        """Add to `output` (..., out), in place, in its dtype, what the LoRA makes of x (..., in).

        Memory: (tokens, rank).
        """
        inner = torch.nn.functional.linear(x, self.down.to(x.dtype))
        flat = output.view(-1, output.shape[-1])
        flat.addmm_(inner.flatten(0, -2), self.up.to(x.dtype).t(), alpha=self.scale)
