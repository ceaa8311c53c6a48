"""What a block's forward allocates: the formula that a plan is made with, held by tests against the allocator."""

from __future__ import annotations

from dataclasses import dataclass

from .settings import TEXT_TOKENS, BlockShape, ForwardSettings

_WORK = 16
"""Bytes per element of one chunk: normed input, projection, and up to three float32 copies inside a kernel."""

_FUSED_WORK = 4.2
"""The same with the fused kernels on a card: normed input, and its projection or rounding to float8."""

_LOW_RANK_WORK = 1
"""More than that when a LoRA's product lies beside the linear's: its input is in float8 then."""

_ATTENTION = 3.3
"""An attention call in units of its result: the result, and what CPU kernels pack of keys and values."""

_CUDA_ATTENTION = 1.1
"""The same on a card: the result and its row sums."""

_FIXED = 2 * 2**20
"""Modulation rows, norm statistics, scratch of an attention kernel."""


def chunk_bytes(shape: BlockShape, *, batch: int, tokens: int, fused: bool = False) -> int:
    """Working memory for `tokens` tokens at a time beside q, k and v; in any compute dtype."""
    return int((_FUSED_WORK if fused else _WORK) * batch * tokens * shape.dim)


@dataclass(frozen=True)
class Moment:
    """One part of a block's forward when it holds most; bytes but for the matrices.

    Args:
        residual: hidden_states itself. heads: q, k and v. work: one chunk, keys and values of the context.
        matrices: elements of the linears held in the compute dtype, where they are stored in another one.
        largest: elements of the largest of them, which are dequantised one after the other.
    """

    residual: int
    heads: int
    work: int
    matrices: int = 0
    largest: int = 0

    @property
    def activations(self) -> int:
        return self.residual + self.heads + self.work


def moments(
    shape: BlockShape,
    settings: ForwardSettings,
    *,
    batch: int,
    tokens: int,
    itemsize: int,
    context_tokens: int = TEXT_TOKENS,
    cuda: bool = False,
    fused: bool = False,
    low_rank: bool = False,
) -> tuple[Moment, ...]:
    """Of one `block_forward`: q, k and v are made; attention over them; cross-attention; feed-forward.

    Not counted: weights as stored, context, rotary embedding, and the conversion of a (B, N, 6, dim) modulation.

    Args:
        itemsize: bytes of an element of hidden_states: 2 or 4.
        cuda: attention runs on a card. fused: so do the fused element-wise kernels. low_rank: with those, LoRAs beside
            float8 products.
    """
    stream = batch * tokens * shape.dim * itemsize
    chunk_tokens = min(settings.chunk_tokens, tokens)
    chunk = chunk_bytes(shape, batch=batch, tokens=chunk_tokens, fused=fused)
    group = batch * tokens * settings.heads_per_call(shape, tokens) * shape.head_dim * itemsize
    attention = int((_CUDA_ATTENTION if cuda else _ATTENTION) * group)
    keys_values = 2 * batch * context_tokens * shape.dim * itemsize
    context_work = chunk_bytes(shape, batch=batch, tokens=context_tokens, fused=fused)
    inner = batch * chunk_tokens * (shape.dim + shape.ffn_dim) * itemsize
    if low_rank:  # ffn.0's product and its LoRA's, and GELU of both in float8
        chunk += _LOW_RANK_WORK * batch * chunk_tokens * shape.dim
        inner = batch * chunk_tokens * shape.ffn_dim * (2 * itemsize + 1)
    heads = 3 * stream
    if settings.packed_attention:
        # int8 and one float32 scale a head; an attention call has its q, k and v in the compute dtype besides
        heads = 3 * batch * tokens * (shape.dim + 4 * shape.num_heads)
        attention += 3 * group
    square, wide = shape.dim**2, shape.dim * shape.ffn_dim
    return (
        Moment(stream, heads, chunk + _FIXED, 3 * square, square),
        Moment(stream, heads, max(chunk, attention) + _FIXED),
        Moment(stream, 0, keys_values + max(chunk, context_work) + _FIXED, 2 * square, square),
        Moment(stream, 0, max(chunk, inner) + _FIXED, 2 * wide, wide),
    )


def activation_bytes(
    shape: BlockShape,
    settings: ForwardSettings,
    *,
    batch: int,
    tokens: int,
    itemsize: int,
    context_tokens: int = TEXT_TOKENS,
    cuda: bool = False,
    fused: bool = False,
) -> int:
    """Upper bound of what one `block_forward` holds at its peak; as `moments`, no copies of weights counted."""
    every = moments(
        shape,
        settings,
        batch=batch,
        tokens=tokens,
        itemsize=itemsize,
        context_tokens=context_tokens,
        cuda=cuda,
        fused=fused,
    )
    return max(moment.activations for moment in every)
