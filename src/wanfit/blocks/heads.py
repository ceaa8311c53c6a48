"""Where q, k and v of the self-attention lie while its heads are worked on, a group at a time."""

from __future__ import annotations

from typing import Protocol

import torch

from .elementwise import Elementwise


class Heads(Protocol):
    """Room for (B, N, H, D)."""

    def room(self, start: int, stop: int) -> torch.Tensor:
        """(B, C, H * D) to write tokens [start, stop) to; `commit` follows."""
        ...

    def commit(self, start: int, stop: int, tokens: torch.Tensor) -> None: ...

    def get(self, group: slice) -> torch.Tensor:
        """(B, N, heads of the group, D)."""
        ...

    def put(self, group: slice, result: torch.Tensor) -> None: ...

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        """(B, C, H * D)."""
        ...


class PlainHeads:
    """In the compute dtype."""

    def __init__(self, like: torch.Tensor, dtype: torch.dtype, num_heads: int) -> None:
        self._data = torch.empty_like(like, dtype=dtype)
        self._heads = self._data.unflatten(2, (num_heads, -1))

    def room(self, start: int, stop: int) -> torch.Tensor:
        return self._data[:, start:stop]

    def commit(self, start: int, stop: int, tokens: torch.Tensor) -> None:
        """Already there."""

    def get(self, group: slice) -> torch.Tensor:
        return self._heads[:, :, group]

    def put(self, group: slice, result: torch.Tensor) -> None:
        self._heads[:, :, group] = result

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        return self._data[:, start:stop]


class PackedHeads:
    """In int8 with one scale for each head of each token: half of the memory, relative error 6e-3 of each vector.

    The attention itself runs in the compute dtype, on one group of heads at a time.
    """

    def __init__(self, like: torch.Tensor, dtype: torch.dtype, num_heads: int, parts: Elementwise) -> None:
        batch, tokens, dim = like.shape
        self._dtype, self._parts = dtype, parts
        self._data = torch.empty(batch, tokens, num_heads, dim // num_heads, dtype=torch.int8, device=like.device)
        self._scale = torch.empty(batch, tokens, num_heads, dtype=torch.float32, device=like.device)

    def room(self, start: int, stop: int) -> torch.Tensor:
        batch, _, heads, size = self._data.shape
        return torch.empty(batch, stop - start, heads * size, dtype=self._dtype, device=self._data.device)

    def commit(self, start: int, stop: int, tokens: torch.Tensor) -> None:
        heads = tokens.unflatten(2, (self._data.shape[2], -1))
        self._parts.pack(heads, self._data[:, start:stop], self._scale[:, start:stop])

    def get(self, group: slice) -> torch.Tensor:
        return self._parts.unpack(self._data[:, :, group], self._scale[:, :, group], self._dtype)

    def put(self, group: slice, result: torch.Tensor) -> None:
        self._parts.pack(result, self._data[:, :, group], self._scale[:, :, group])

    def tokens(self, start: int, stop: int) -> torch.Tensor:
        return self._parts.unpack(self._data[:, start:stop], self._scale[:, start:stop], self._dtype).flatten(2)
