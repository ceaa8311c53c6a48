"""The memory-lean forward of one Wan transformer block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F

from ..errors import InputError
from ..quant.weight import StoredWeight
from . import modulation as slots
from .adapter import LowRank
from .modulation import BlockModulation, TokenModulation
from .projection import BlockWeights
from .rope import rotate_into
from .settings import TEXT_TOKENS, BlockShape, ForwardSettings


@torch.no_grad()
def block_forward(
    hidden_states: torch.Tensor,
    weights: Mapping[str, StoredWeight],
    shape: BlockShape,
    *,
    context: torch.Tensor,
    modulation: torch.Tensor | TokenModulation,
    rotary_emb: tuple[torch.Tensor, torch.Tensor],
    settings: ForwardSettings,
    adapters: Mapping[str, Sequence[LowRank]] | None = None,
) -> torch.Tensor:
    """Run one block of any Wan 2.1 / 2.2 transformer. No gradients.

    Args:
        hidden_states: (B, N, dim), float32, float16 or bfloat16; UPDATED IN PLACE and returned.
        weights: by original name without `blocks.N.`, on the same device, in any stored format.
        context: (B, L, dim): the text tokens, behind the image tokens where the model has them.
        modulation: projected timestep: (B, 6, dim), (B, N, 6, dim) or `TokenModulation`.
        rotary_emb: (cos, sin), each (1, N, 1, head_dim), as diffusers' `WanRotaryPosEmbed` gives them.
        adapters: LoRAs by the name of their linear: `self_attn.q`, `ffn.0` ...

    Raises:
        InputError: tensor_mismatch: the tensors do not fit each other or `shape`.
        CheckpointError: tensors_missing: `weights` lacks a name.

    Memory: `activation_bytes`: hidden_states, q, k and v, plus work on one chunk. The attention result
        overwrites q. Each weight is dequantised once; at a time q, k and v of the self-attention, or the two
        of the feed-forward (2 x 135 MiB in bf16 at 14B, when q, k and v are gone).
    Source: diffusers 0.42.1 models/transformers/transformer_wan.py, Apache-2.0 (the arithmetic).
    """
    _check(hidden_states, shape, context, rotary_emb)
    batch, tokens, _ = hidden_states.shape
    block = BlockWeights(weights, hidden_states.dtype, adapters)
    mod = BlockModulation(block.tensor("modulation", torch.float32), modulation, batch, tokens)
    spans = [(i, min(i + settings.chunk_tokens, tokens)) for i in range(0, tokens, settings.chunk_tokens)]

    _self_attention(hidden_states, block, shape, mod, rotary_emb, spans, settings)
    _cross_attention(hidden_states, block, shape, context, spans, settings)
    _feed_forward(hidden_states, block, shape, mod, spans)
    return hidden_states


def _self_attention(
    hidden: torch.Tensor,
    block: BlockWeights,
    shape: BlockShape,
    mod: BlockModulation,
    rotary_emb: tuple[torch.Tensor, torch.Tensor],
    spans: list[tuple[int, int]],
    settings: ForwardSettings,
) -> None:
    result = _attention_over_tokens(hidden, block, shape, mod, rotary_emb, spans, settings)
    project = block.projection("self_attn.o")
    for start, stop in spans:
        _add_gated(hidden, project(result[:, start:stop]), mod, slots.GATE_ATTN, start, stop)


def _attention_over_tokens(
    hidden: torch.Tensor,
    block: BlockWeights,
    shape: BlockShape,
    mod: BlockModulation,
    rotary_emb: tuple[torch.Tensor, torch.Tensor],
    spans: list[tuple[int, int]],
    settings: ForwardSettings,
) -> torch.Tensor:
    """Self-attention without its output projection: (B, N, dim). k and v end with this call."""
    q, k, v = (hidden.new_empty(hidden.shape) for _ in range(3))
    _fill_qkv(q, k, v, hidden, block, shape, mod, rotary_emb, spans)
    q_heads, k_heads, v_heads = (x.unflatten(2, (shape.num_heads, -1)) for x in (q, k, v))
    step = settings.heads_per_call(shape, hidden.shape[1])
    for first in range(0, shape.num_heads, step):
        group = (slice(None), slice(None), slice(first, first + step))
        q_heads[group] = settings.attention(q_heads[group], k_heads[group], v_heads[group])
    return q


def _fill_qkv(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    hidden: torch.Tensor,
    block: BlockWeights,
    shape: BlockShape,
    mod: BlockModulation,
    rotary_emb: tuple[torch.Tensor, torch.Tensor],
    spans: list[tuple[int, int]],
) -> None:
    to_q, to_k, to_v = (block.projection(f"self_attn.{name}") for name in "qkv")
    norm_q, norm_k = (block.tensor(f"self_attn.norm_{name}.weight") for name in "qk")
    cos, sin = rotary_emb
    for start, stop in spans:
        x = _modulated_norm(hidden, shape, mod, (slots.SHIFT_ATTN, slots.SCALE_ATTN), start, stop)
        v[:, start:stop] = to_v(x)
        turn = cos[:, start:stop], sin[:, start:stop]
        for target, project, norm in ((q, to_q, norm_q), (k, to_k, norm_k)):
            rotate_into(
                target[:, start:stop],
                F.rms_norm(project(x), (shape.dim,), norm, shape.eps),
                *turn,
                shape.num_heads,
            )


def _cross_attention(
    hidden: torch.Tensor,
    block: BlockWeights,
    shape: BlockShape,
    context: torch.Tensor,
    spans: list[tuple[int, int]],
    settings: ForwardSettings,
) -> None:
    keys_values = list(_context_keys_values(block, shape, context))
    to_q, to_out = block.projection("cross_attn.q"), block.projection("cross_attn.o")
    norm_q = block.tensor("cross_attn.norm_q.weight")
    norm = block.tensor("norm3.weight", torch.float32), block.tensor("norm3.bias", torch.float32)
    for start, stop in spans:
        residual = hidden[:, start:stop]
        x = F.layer_norm(residual.float(), (shape.dim,), *norm, shape.eps).to(hidden.dtype)
        q = F.rms_norm(to_q(x), (shape.dim,), norm_q, shape.eps).unflatten(2, (shape.num_heads, -1))
        del x
        result = settings.attention(q, *keys_values[0])
        for key_value in keys_values[1:]:
            result = result + settings.attention(q, *key_value)
        del q
        residual += to_out(result.flatten(2))


def _context_keys_values(
    block: BlockWeights, shape: BlockShape, context: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Keys and values (B, L, heads, head_dim) of the text, then of the image tokens if there are any."""
    image = context.shape[1] - TEXT_TOKENS if shape.image_tokens is None else shape.image_tokens
    parts = [("", context[:, image:])] + ([("_img", context[:, :image])] if image else [])
    for suffix, tokens in parts:
        norm = block.tensor(f"cross_attn.norm_k{suffix}.weight")
        key = F.rms_norm(block.projection(f"cross_attn.k{suffix}")(tokens), (shape.dim,), norm, shape.eps)
        value = block.projection(f"cross_attn.v{suffix}")(tokens)
        yield key.unflatten(2, (shape.num_heads, -1)), value.unflatten(2, (shape.num_heads, -1))


def _feed_forward(
    hidden: torch.Tensor,
    block: BlockWeights,
    shape: BlockShape,
    mod: BlockModulation,
    spans: list[tuple[int, int]],
) -> None:
    widen, narrow = block.projection("ffn.0"), block.projection("ffn.2")
    for start, stop in spans:
        inner = widen(_modulated_norm(hidden, shape, mod, (slots.SHIFT_FFN, slots.SCALE_FFN), start, stop))
        torch.ops.aten.gelu_(inner, approximate="tanh")
        update = narrow(inner)
        del inner
        _add_gated(hidden, update, mod, slots.GATE_FFN, start, stop)


def _modulated_norm(
    hidden: torch.Tensor,
    shape: BlockShape,
    mod: BlockModulation,
    shift_and_scale: tuple[int, int],
    start: int,
    stop: int,
) -> torch.Tensor:
    """norm(hidden) * (1 + scale) + shift of tokens [start, stop), in float32, returned in hidden's dtype."""
    normed = F.layer_norm(hidden[:, start:stop].float(), (shape.dim,), eps=shape.eps)
    out = normed if hidden.dtype == torch.float32 else normed.new_empty(normed.shape, dtype=hidden.dtype)
    shifts, scales = (mod.parts(slot, start, stop) for slot in shift_and_scale)
    for (part, shift), (_, scale) in zip(shifts, scales, strict=True):
        torch.addcmul(shift, normed[:, part], scale, out=out[:, part])
    return out


def _add_gated(
    hidden: torch.Tensor, update: torch.Tensor, mod: BlockModulation, slot: int, start: int, stop: int
) -> None:
    """hidden += update * gate for tokens [start, stop), computed in float32, in place."""
    for part, gate in mod.parts(slot, start, stop):
        residual = hidden[:, start:stop][:, part]
        torch.addcmul(residual, update[:, part], gate, out=residual)


def _check(
    hidden: torch.Tensor,
    shape: BlockShape,
    context: torch.Tensor,
    rotary_emb: tuple[torch.Tensor, torch.Tensor],
) -> None:
    batch, tokens, dim = hidden.shape
    rotary_shape = (1, tokens, 1, shape.head_dim)
    image = shape.image_tokens
    fits = (
        hidden.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and dim == shape.dim
        and tokens > 0
        and context.dtype == hidden.dtype
        and (context.shape[0], context.shape[2]) == (batch, dim)
        and context.shape[1] >= (TEXT_TOKENS if image is None else image + 1)
        and all(tuple(x.shape) == rotary_shape for x in rotary_emb)
    )
    if not fits:
        raise InputError(
            "tensor_mismatch",
            "denoise",
            f"hidden states {tuple(hidden.shape)} {hidden.dtype}, context {tuple(context.shape)} {context.dtype} "
            f"and rotary embedding {[tuple(x.shape) for x in rotary_emb]} do not fit a block with {shape}",
            f"Give one dtype, one batch size, and a rotary embedding of shape {rotary_shape}",
        )
