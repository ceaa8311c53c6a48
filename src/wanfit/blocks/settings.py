"""What a block is, and how its forward is to be run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import InputError
from .attention import AttentionBackend, sdpa
from .elementwise import Elementwise

TEXT_TOKENS = 512
"""Text tokens that diffusers' Wan processor takes for granted behind the image tokens."""


@dataclass(frozen=True)
class BlockShape:
    """The shape of one transformer block.

    Args:
        image_tokens: how many of the context's first tokens are image tokens with projections of their own
            (Wan 2.1 I2V: 257, FLF2V: 514); 0 for all other models; None for diffusers' convention: all but
            the last 512.
    """

    dim: int
    num_heads: int
    ffn_dim: int
    eps: float = 1e-6
    image_tokens: int | None = 0

    def __post_init__(self) -> None:
        if min(self.dim, self.num_heads, self.ffn_dim) < 1 or self.dim % self.num_heads:
            raise InputError(
                "number_invalid",
                "load",
                f"a block of <dim> {self.dim}, <num_heads> {self.num_heads}, <ffn_dim> {self.ffn_dim} cannot be",
                "All three must be positive and <dim> a multiple of <num_heads>",
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


@dataclass(frozen=True)
class ForwardSettings:
    """How to run a block: one number trades memory against time, the result stays the same up to rounding.

    Args:
        chunk_tokens: tokens that are worked on at a time; any number from 1, larger than the sequence too.
            Attention is cut into groups of heads whose result is no larger than one such chunk.
        attention: the back end.
        float8_matmul: multiply float8 weights in float8; None where the card has the units. The activations are
            rounded to float8 then: relative error about 3e-2 of each product.
        packed_attention: keep q, k and v of the self-attention in 8 bits until their heads' turn: 1.5 times the
            residual less memory, relative error about 1e-2 of the attention's result.
        elementwise: None for the fused kernels where Triton works, else plain PyTorch.
        check_interrupt: called by `LeanBlock` before each block; raises to stop the run.
    """

    chunk_tokens: int
    attention: AttentionBackend = sdpa
    float8_matmul: bool | None = None
    packed_attention: bool = False
    elementwise: Elementwise | None = None
    check_interrupt: Callable[[], None] | None = None

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise InputError(
                "number_invalid",
                "plan",
                f"<chunk_tokens> is {self.chunk_tokens}",
                "Give 1 or more; 4096 is a good start",
            )

    def heads_per_call(self, shape: BlockShape, tokens: int) -> int:
        """Heads of one attention call: the most, evenly, whose result fits in one chunk; at least one."""
        fitting = max(1, shape.num_heads * self.chunk_tokens // tokens)
        return max(n for n in range(1, shape.num_heads + 1) if shape.num_heads % n == 0 and n <= fitting)
