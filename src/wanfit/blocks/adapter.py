"""LoRA on a linear: added to its output, or into its dequantised matrix; what is stored stays as it is."""

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
        output.view(-1, output.shape[-1]).addmm_(inner.flatten(0, -2), self.up.to(x.dtype).t(), alpha=self.scale)

    def merged_into(self, matrix: torch.Tensor, *, in_place: bool) -> torch.Tensor:
        """`matrix` (out, in) + scale * up @ down, rounded once to its dtype.

        Memory: another such matrix unless `in_place`.
        """
        up, down = self.up.to(matrix.dtype), self.down.to(matrix.dtype)
        if in_place:
            return matrix.addmm_(up, down, alpha=self.scale)
        return torch.addmm(matrix, up, down, alpha=self.scale)
