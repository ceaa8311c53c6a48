"""The memory-lean forward of one Wan transformer block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..errors import InputError
from ..quant.float8_matmul import Float8Rows, float8_units
from ..quant.weight import StoredWeight
from . import modulation as slots
from .adapter import LowRank
from .elementwise import Elementwise, elementwise_for
from .heads import Heads, PackedHeads, PlainHeads
from .modulation import BlockModulation, TokenModulation
from .product import Product
from .projection import BlockWeights
from .settings import TEXT_TOKENS, BlockShape, ForwardSettings


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a host should keep the residual in between blocks, for a compute dtype: float16 for bfloat16.

    A residual that is rounded to bfloat16 three times a block makes most of the error of 40 blocks (docs/LOG.md).
    float16 ends at 65504: a host looks at the result, and takes bfloat16 where it is not finite.
    """
    return torch.float16 if dtype == torch.bfloat16 else dtype


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
        hidden_states: (B, N, dim), the residual; UPDATED IN PLACE and returned. In the compute dtype (float32, float16
            or bfloat16), or in float16 where that is bfloat16: 3 bits more, and no more memory.
        weights: by original name without `blocks.N.`, on the same device, in any stored format.
        context: (B, L, dim), in the compute dtype: the text tokens, behind the image tokens where the model has them.
        modulation: projected timestep: (B, 6, dim), (B, N, 6, dim) or `TokenModulation`.
        rotary_emb: (cos, sin), each (1, N, 1, head_dim), as diffusers' `WanRotaryPosEmbed` gives them.
        adapters: LoRAs by the name of their linear: `self_attn.q`, `ffn.0` ...

    Raises:
        InputError: tensor_mismatch: the tensors do not fit each other or `shape`.
        CheckpointError: tensors_missing: `weights` lacks a name.

    Memory: `activation_bytes`: hidden_states, q, k and v, plus work on one chunk. The attention result overwrites
        q. Each weight that is not multiplied as stored is dequantised once; at a time q, k and v of the
        self-attention, or the two of the feed-forward (2 x 135 MiB in bf16 at 14B, when q, k and v are gone).
    Source: diffusers 0.42.1 models/transformers/transformer_wan.py, Apache-2.0 (the arithmetic).
    """
    _check(hidden_states, shape, context, rotary_emb)
    batch, tokens, _ = hidden_states.shape
    device, dtype = hidden_states.device, context.dtype
    float8 = float8_units(device) if settings.float8_matmul is None else settings.float8_matmul
    parts = settings.elementwise or elementwise_for(device, dtype)
    block = BlockWeights(weights, dtype, adapters, float8=float8, rows=batch * tokens, quantize=parts.quantize)
    mod = BlockModulation(block.tensor("modulation", torch.float32), modulation, batch, tokens)
    spans = [(i, min(i + settings.chunk_tokens, tokens)) for i in range(0, tokens, settings.chunk_tokens)]
    work = _Work(hidden_states, dtype, block, shape, settings, mod, spans, parts)

    work.self_attention(rotary_emb)
    work.cross_attention(context)
    work.feed_forward()
    return hidden_states


@dataclass(frozen=True)
class _Work:
    """One forward: the residual and what all of its parts need."""

    hidden: torch.Tensor
    dtype: torch.dtype
    block: BlockWeights
    shape: BlockShape
    settings: ForwardSettings
    mod: BlockModulation
    spans: list[tuple[int, int]]
    parts: Elementwise

    def self_attention(self, rotary_emb: tuple[torch.Tensor, torch.Tensor]) -> None:
        result = self._attention_over_tokens(rotary_emb)
        (project,) = self.block.projections("self_attn.o")
        for start, stop in self.spans:
            x = result.tokens(start, stop)
            self._add_gated(project(self.parts.quantize(x) if project.float8 else x), slots.GATE_ATTN, start, stop)

    def _attention_over_tokens(self, rotary_emb: tuple[torch.Tensor, torch.Tensor]) -> Heads:
        """Self-attention without its output projection, in q's memory. k and v end with this call."""
        heads = self.shape.num_heads
        q, k, v = (self._new_heads() for _ in range(3))
        self._fill_qkv(q, k, v, rotary_emb)
        step = self.settings.heads_per_call(self.shape, self.hidden.shape[1])
        for first in range(0, heads, step):
            group = slice(first, first + step)
            q.put(group, self.settings.attention(q.get(group), k.get(group), v.get(group)))
        return q

    def _new_heads(self) -> Heads:
        if self.settings.packed_attention:
            return PackedHeads(self.hidden, self.dtype, self.shape.num_heads, self.parts)
        return PlainHeads(self.hidden, self.dtype, self.shape.num_heads)

    def _fill_qkv(self, q: Heads, k: Heads, v: Heads, rotary_emb: tuple[torch.Tensor, torch.Tensor]) -> None:
        to_q, to_k, to_v = self.block.projections(*(f"self_attn.{name}" for name in "qkv"))
        norm_q, norm_k = (self.block.tensor(f"self_attn.norm_{name}.weight") for name in "qk")
        cos, sin = rotary_emb
        heads, eps = self.shape.num_heads, self.shape.eps
        for start, stop in self.spans:
            x = self._modulated_norm((slots.SHIFT_ATTN, slots.SCALE_ATTN), start, stop, quantize=to_q.float8)
            room = v.room(start, stop)
            self.parts.store(to_v(x), room)
            v.commit(start, stop, room)
            turn = cos[:, start:stop], sin[:, start:stop]
            for target, project, norm in ((q, to_q, norm_q), (k, to_k, norm_k)):
                room = target.room(start, stop)
                self.parts.rms_norm_rotate(project(x), norm, eps, turn, heads, room)
                target.commit(start, stop, room)

    def cross_attention(self, context: torch.Tensor) -> None:
        keys_values = list(self._context_keys_values(context))
        (to_q,) = self.block.projections("cross_attn.q")
        (to_out,) = self.block.projections("cross_attn.o")
        norm_q = self.block.tensor("cross_attn.norm_q.weight")
        scale, shift = (self.block.tensor(f"norm3.{name}", torch.float32).view(1, 1, -1) for name in ("weight", "bias"))
        heads, eps, attention = self.shape.num_heads, self.shape.eps, self.settings.attention
        for start, stop in self.spans:
            residual = self.hidden[:, start:stop]
            q = to_q(self.parts.norm(residual, shift, scale, eps, dtype=self.dtype, quantize=to_q.float8))
            self.parts.rms_norm_rotate(q, norm_q, eps, None, heads, q.data)
            query = q.data.unflatten(2, (heads, -1))
            result = attention(query, *keys_values[0])
            for key_value in keys_values[1:]:
                result = result + attention(query, *key_value)
            del q, query
            result = result.flatten(2)
            self.parts.add_gated(to_out(self.parts.quantize(result) if to_out.float8 else result), None, residual)

    def _context_keys_values(self, context: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values (B, L, heads, head_dim) of the text, then of the image tokens if there are any."""
        image_tokens, heads = self.shape.image_tokens, self.shape.num_heads
        image = context.shape[1] - TEXT_TOKENS if image_tokens is None else image_tokens
        groups = [("", context[:, image:])] + ([("_img", context[:, :image])] if image else [])
        for suffix, tokens in groups:
            norm = self.block.tensor(f"cross_attn.norm_k{suffix}.weight")
            rows = tokens.shape[0] * tokens.shape[1]
            to_k, to_v = self.block.projections(f"cross_attn.k{suffix}", f"cross_attn.v{suffix}", rows=rows)
            x = self.parts.quantize(tokens) if to_k.float8 else tokens
            key = to_k(x)
            self.parts.rms_norm_rotate(key, norm, self.shape.eps, None, heads, key.data)
            value = to_v(x)
            yield key.data.unflatten(2, (heads, -1)), value.value().unflatten(2, (heads, -1))

    def feed_forward(self) -> None:
        (widen,) = self.block.projections("ffn.0")
        (narrow,) = self.block.projections("ffn.2")
        for start, stop in self.spans:
            inner = self.parts.gelu(
                widen(self._modulated_norm((slots.SHIFT_FFN, slots.SCALE_FFN), start, stop, quantize=widen.float8)),
                quantize=narrow.float8,
            )
            update = narrow(inner)
            del inner
            self._add_gated(update, slots.GATE_FFN, start, stop)

    def _modulated_norm(
        self, shift_and_scale: tuple[int, int], start: int, stop: int, *, quantize: bool
    ) -> torch.Tensor | Float8Rows:
        """norm(hidden) * (1 + scale) + shift of tokens [start, stop)."""
        shifts, scales = (list(self.mod.parts(slot, start, stop)) for slot in shift_and_scale)
        x, eps, dtype = self.hidden[:, start:stop], self.shape.eps, self.dtype
        if len(shifts) == 1:
            return self.parts.norm(x, shifts[0][1], scales[0][1], eps, dtype=dtype, quantize=quantize)
        shift, scale = (
            torch.cat([vector.expand(-1, part.stop - part.start, -1) for part, vector in vectors], dim=1)
            for vectors in (shifts, scales)
        )
        return self.parts.norm(x, shift, scale, eps, dtype=dtype, quantize=quantize)

    def _add_gated(self, update: Product, slot: int, start: int, stop: int) -> None:
        """hidden += update * gate for tokens [start, stop), computed in float32, in place."""
        gates = list(self.mod.parts(slot, start, stop))
        residual = self.hidden[:, start:stop]
        if len(gates) == 1:
            self.parts.add_gated(update, gates[0][1], residual)
            return
        value = update.value()
        for part, gate in gates:
            self.parts.add_gated(Product(value[:, part].contiguous()), gate, residual[:, part])


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
        context.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and dim == shape.dim
        and tokens > 0
        and hidden.dtype in (context.dtype, residual_dtype(context.dtype))
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
