"""diffusers' Wan transformer with its blocks run by the engine and its own large temporaries cut into chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from torch import nn

from ..blocks import BlockShape, ForwardSettings, LeanBlock, TokenModulation, WeightSource, residual_dtype
from ..checkpoint import Checkpoint, Identity, to_diffusers_transformer
from ..errors import InputError
from ..offload import Ladder, PatchStore
from ..quant import dequantize
from .loras import ModelPatches

PATCH = (1, 2, 2)
FLOAT32_PARTS = ("condition_embedder.time_embedder", "scale_shift_table")


class LeanTransformer(WanTransformer3DModel):
    """`WanTransformer3DModel` whose blocks are `LeanBlock`s; the same inputs, the same result up to rounding.

    Built empty (on the meta device) by `build_transformer`; `load_rest` brings its small own weights
    (embeddings and head, 0.23 B parameters in A14B) to a device, `release` drops them again.
    """

    ladder: Ladder
    before_forward: Callable[[LeanTransformer], None] | None = None
    """Called at the start of each forward: where the expert that is about to run is brought in."""
    skip: Callable[[], bool] | None = None
    """Says whether the result of a forward does not matter, as in the steps that a resumed run passes through."""
    patches: ModelPatches | None = None
    """LoRAs, applied from the next `load_rest` on."""
    keep_patches: bool = False
    """Whether the LoRAs of the blocks stay on the device between `load_rest` and `release`; else they are streamed."""
    block_patches: PatchStore | None = None
    _wide_residual: bool = True
    """Whether tokens go from block to block in `residual_dtype`, not in the compute dtype."""

    def attach(self, source: WeightSource, shape: BlockShape, ladder: Ladder) -> None:
        """Replace the blocks by lean ones over `source`; `ladder` says how they run."""
        self.ladder = ladder
        count = len(self.blocks)
        self.blocks = nn.ModuleList([LeanBlock(index, source, shape, ladder.settings) for index in range(count)])

    def load_rest(self, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> None:
        """Bring all weights outside the blocks to `device`: linears in `dtype`, time embedding and tables float32."""
        patches = self.patches or ModelPatches()
        state: dict[str, torch.Tensor] = {}
        for name in checkpoint.tensors:
            if not name.startswith("blocks."):
                target = to_diffusers_transformer(name)
                wanted = torch.float32 if target.startswith(FLOAT32_PARTS) else dtype
                stored = checkpoint.load(name).to(device)
                patch = patches.rest.get(name)
                state[target] = dequantize(stored, wanted) if patch is None else patch.on(stored, wanted)
        self.load_state_dict(state, strict=True, assign=True)
        self.rope.to(device)
        if patches.blocks:
            self.block_patches = PatchStore(patches.blocks, device, dtype, keep=self.keep_patches)
        for block in cast("Iterable[LeanBlock]", self.blocks):
            block.patches = self.block_patches

    def release(self) -> None:
        """Give the memory of the weights outside the blocks back."""
        rope = self._modules.pop("rope")
        nn.Module.to(self, "meta")
        self.add_module("rope", rope)
        for block in cast("Iterable[LeanBlock]", self.blocks):
            block.patches = None
        if self.block_patches is not None:
            self.block_patches.close()
            self.block_patches = None

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_hidden_states_image: torch.Tensor | None = None,
        return_dict: bool = True,
        attention_kwargs: dict[str, Any] | None = None,
    ) -> Transformer2DModelOutput | tuple[torch.Tensor]:
        """As `WanTransformer3DModel.forward`.

        Args:
            hidden_states: (B, C, T, H, W) latents. timestep: (B,), or (B, N) when tokens differ (TI2V-5B).
            encoder_hidden_states: (B, 512, text_dim).
        Memory: see `wanfit.blocks.block_forward`; outside the blocks one chunk.
        Source: diffusers models/transformers/transformer_wan.py@0.42.1, Apache-2.0.
        """
        if attention_kwargs:
            raise InputError(
                "tensor_mismatch", "denoise", f"attention_kwargs {sorted(attention_kwargs)} are not supported"
            )
        if self.skip is not None and self.skip():
            batch, _, *size = hidden_states.shape
            nothing = hidden_states.new_zeros(batch, cast("Any", self.config).out_channels, *size)
            return Transformer2DModelOutput(sample=nothing) if return_dict else (nothing,)
        if self.before_forward is not None:
            self.before_forward(self)

        def run(settings: ForwardSettings) -> torch.Tensor:
            return self._run(settings, hidden_states, timestep, encoder_hidden_states, encoder_hidden_states_image)

        output = self.ladder.run(run)
        if self._residual(hidden_states.dtype) != hidden_states.dtype and not bool(output.isfinite().all()):
            self._wide_residual = False
            output = self.ladder.run(run)
            if bool(output.isfinite().all()):
                self.ladder.note("the residual left the range of float16: kept in bfloat16, less exact, from here on")
            else:  # the cause lies elsewhere; whoever looks at the latents says so
                self._wide_residual = True
        return Transformer2DModelOutput(sample=output) if return_dict else (output,)

    def _run(
        self,
        settings: ForwardSettings,
        latents: torch.Tensor,
        timestep: torch.Tensor,
        text: torch.Tensor,
        image: torch.Tensor | None,
    ) -> torch.Tensor:
        """One attempt at a forward; leaves its inputs as they are."""
        batch, _, frames, height, width = latents.shape
        step_t, step_h, step_w = PATCH
        grid = (frames // step_t, height // step_h, width // step_w)
        rotary = self.rope(latents)
        dtype = latents.dtype
        tokens = self.patch_embedding(latents).flatten(2).transpose(1, 2)
        tokens = tokens.to(self._residual(dtype), memory_format=torch.contiguous_format).contiguous()

        timesteps, lengths = _runs(timestep, tokens.shape[1])
        temb, projected, context, image_context = self.condition_embedder(timesteps.flatten(), text, image)
        temb = temb.unflatten(0, timesteps.shape)
        rows = projected.unflatten(0, timesteps.shape).unflatten(2, (6, -1))
        if image_context is not None:
            context = torch.cat([image_context, context], dim=1)
        modulation = TokenModulation(rows, lengths)
        for block in cast("Iterable[LeanBlock]", self.blocks):
            block.settings = settings = self.ladder.next_block()
            tokens = block(tokens, context, modulation, rotary)

        patches = self._head(tokens, temb, lengths, settings.chunk_tokens, dtype)
        patches = patches.reshape(batch, *grid, step_t, step_h, step_w, -1).permute(0, 7, 1, 4, 2, 5, 3, 6)
        return patches.flatten(6, 7).flatten(4, 5).flatten(2, 3)

    def _residual(self, dtype: torch.dtype) -> torch.dtype:
        return residual_dtype(dtype) if self._wide_residual else dtype

    def _head(
        self, tokens: torch.Tensor, temb: torch.Tensor, lengths: tuple[int, ...], chunk: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Output norm, modulation and projection, a chunk at a time: (B, N, dim) -> (B, N, out x patch) in `dtype`."""
        shift, scale = (self.scale_shift_table.unsqueeze(0) + temb.unsqueeze(2)).unbind(dim=2)
        batch, count, _ = tokens.shape
        output = tokens.new_empty(batch, count, len(self.proj_out.bias), dtype=dtype)
        start = 0
        for run, length in enumerate(lengths):
            for part in range(start, start + length, chunk):
                piece = slice(part, min(part + chunk, start + length))
                normed = self.norm_out(tokens[:, piece].float())
                normed = normed * (1 + scale[:, run : run + 1]) + shift[:, run : run + 1]
                output[:, piece] = self.proj_out(normed.to(dtype))
            start += length
        return output


def _runs(timestep: torch.Tensor, tokens: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Timesteps (B, R) that are constant over runs of tokens, and the runs' lengths."""
    if timestep.ndim == 1:
        return timestep.unsqueeze(1), (tokens,)
    changes = (timestep[:, 1:] != timestep[:, :-1]).any(dim=0).nonzero().flatten() + 1
    starts = [0, *changes.tolist()]
    lengths = tuple(stop - start for start, stop in zip(starts, [*starts[1:], timestep.shape[1]], strict=True))
    return timestep[:, starts], lengths


def transformer_config(identity: Identity) -> dict[str, Any]:
    """The diffusers configuration of an identified transformer."""
    image = identity.image_dim or None
    return {
        "num_attention_heads": identity.num_heads,
        "attention_head_dim": identity.dim // identity.num_heads,
        "in_channels": identity.in_channels,
        "out_channels": identity.out_channels,
        "text_dim": identity.text_dim,
        "ffn_dim": identity.ffn_dim,
        "num_layers": identity.num_layers,
        "image_dim": image,
        "added_kv_proj_dim": identity.dim if image else None,
        "pos_embed_seq_len": 514 if identity.variant.startswith("flf2v") else None,
    }


def block_shape(identity: Identity) -> BlockShape:
    """The shape of an identified transformer's blocks."""
    image_tokens = None if identity.image_dim else 0
    return BlockShape(identity.dim, identity.num_heads, identity.ffn_dim, image_tokens=image_tokens)


def build_transformer(
    checkpoint: Checkpoint, source: WeightSource, ladder: Ladder, dtype: torch.dtype
) -> LeanTransformer:
    """The transformer of a checkpoint, empty but for its position table; call `load_rest` before its forward.

    Memory: none to speak of.
    """
    identity = checkpoint.identity
    with init_empty_weights():
        model = LeanTransformer(**transformer_config(identity))
    model.attach(source, block_shape(identity), ladder)
    model.patch_embedding.to(dtype)
    return model.eval().requires_grad_(False)
