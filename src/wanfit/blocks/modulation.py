"""The six vectors that shift, scale and gate a block: one row per sample, per run of tokens, or per token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..errors import InputError

SHIFT_ATTN, SCALE_ATTN, GATE_ATTN, SHIFT_FFN, SCALE_FFN, GATE_FFN = range(6)


@dataclass(frozen=True)
class TokenModulation:
    """Projected timesteps that are constant over runs of neighbouring tokens.

    TI2V-5B gives the first frame's tokens timestep 0 and all others t: two rows, where diffusers builds
    (B, N, 6, dim), 12 times the size of the residual while a block works on it.

    Args:
        rows: (B, R, 6, dim), what `time_proj` makes of each run's timestep.
        lengths: tokens of each run, in order; they add up to N.
    """

    rows: torch.Tensor
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.rows.ndim != 4 or self.rows.shape[2] != 6 or self.rows.shape[1] != len(self.lengths):
            raise InputError(
                "tensor_mismatch",
                "denoise",
                f"modulation rows of shape {tuple(self.rows.shape)} came with {len(self.lengths)} run lengths",
                "Give rows of shape (batch, runs, 6, dim) and one length a run",
            )


class BlockModulation:
    """A block's own modulation plus the projected timestep, in float32, ready for one forward.

    Args:
        table: the block's `modulation`, (1, 6, dim), float32.
        timestep: (B, 6, dim), (B, N, 6, dim) or `TokenModulation`.
        tokens: N.

    Memory: the rows in float32; of (B, N, 6, dim) only the part in use is ever converted.
    """

    def __init__(self, table: torch.Tensor, timestep: torch.Tensor | TokenModulation, batch: int, tokens: int) -> None:
        table = table.clone()
        for scale in (SCALE_ATTN, SCALE_FFN):  # one by one: a list of indices would make the host wait for the device
            table[:, scale] += 1
        self._table = table
        self._per_token: torch.Tensor | None = None
        self._rows = table
        self._runs: list[tuple[int, int]] = []

        source = timestep.rows if isinstance(timestep, TokenModulation) else timestep
        if isinstance(timestep, TokenModulation):
            ends = list(itertools.accumulate(timestep.lengths))
        else:
            ends = [tokens] if source.ndim == 3 else []
        total = ends[-1] if ends else source.shape[1]
        fits = source.shape[0] in (1, batch) and source.shape[-2:] == table.shape[-2:] and total == tokens
        if source.ndim not in (3, 4) or not fits:
            raise InputError(
                "tensor_mismatch",
                "denoise",
                f"modulation of shape {tuple(source.shape)} for {total} tokens does not fit {batch} sequences of "
                f"{tokens} tokens and a block of shape {tuple(table.shape)}",
                "Give (batch, 6, dim), (batch, tokens, 6, dim), or rows with run lengths that add up to the tokens",
            )
        if not ends:
            self._per_token = source
        else:
            self._rows = table.unsqueeze(1) + (source.unsqueeze(1) if source.ndim == 3 else source).float()
            self._runs = list(zip([0, *ends], ends, strict=False))

    def parts(self, slot: int, start: int, stop: int) -> Iterator[tuple[slice, torch.Tensor]]:
        """The vectors of `slot` for tokens [start, stop).

        Yields slices relative to `start` that cover the range, each with float32 (B or 1, 1 or length, dim).
        The scales are 1 + scale.
        """
        if self._per_token is not None:
            vectors = self._per_token[:, start:stop, slot].float()
            yield slice(0, stop - start), vectors + self._table[:, slot : slot + 1]
            return
        for row, (first, end) in enumerate(self._runs):
            low, high = max(first, start), min(end, stop)
            if low < high:
                yield slice(low - start, high - start), self._rows[:, row, slot : slot + 1]
