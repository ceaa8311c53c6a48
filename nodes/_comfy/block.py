"""A transformer block of ComfyUI's Wan model that the engine runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...src.wanfit.blocks import TokenModulation, block_forward
from ...src.wanfit.errors import InputError
from . import options
from .runtime import EngineRuntime


class EngineBlock(nn.Module):
    """Takes the place of `WanAttentionBlock`. Has no parameters; its `state_dict` shows the original names.

    Args:
        index: the block's number in the file.
        image_tokens: whether cross-attention treats the context's first tokens as image tokens (Wan 2.1 I2V).
    """

    def __init__(self, index: int, runtime: EngineRuntime, image_tokens: bool) -> None:
        super().__init__()
        self.index, self.runtime, self.image_tokens = index, runtime, image_tokens

    def forward(
        self,
        x: torch.Tensor,
        e: torch.Tensor,
        freqs: torch.Tensor,
        context: torch.Tensor,
        context_img_len: int | None = None,
        transformer_options: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """As ComfyUI calls its own block: x (B, N, dim), e (B, runs, 6, dim), freqs its rotation matrices."""
        transformer_options = transformer_options or {}
        if self.index == 0:
            options.check(transformer_options)
        if options.keeps_block_input(transformer_options, self.index):
            x = x.clone(memory_format=torch.contiguous_format)
        elif self.index == 0:
            x = _in_order(x)
        with self.runtime.onload(self.index, x.device, transformer_options) as call:
            if call.settings.check_interrupt is not None:
                call.settings.check_interrupt()
            return block_forward(
                x,
                call.weights,
                self.runtime.shape_for(self._image_tokens(context_img_len)),
                context=context,
                modulation=_modulation(e, x.shape[1]),
                rotary_emb=self.runtime.rotary(freqs),
                settings=call.settings,
                adapters=call.adapters,
            )

    def _image_tokens(self, context_img_len: int | None) -> int:
        if not self.image_tokens:
            return 0
        if context_img_len is None:
            raise InputError(
                "image_missing",
                "denoise",
                "a Wan 2.1 image-to-video model was given no <clip_vision_output>",
                "Connect CLIPVisionEncode to WanImageToVideo",
            )
        return context_img_len

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name in self.runtime.tensor_names(self.index):
            destination[prefix + name] = torch.empty(0)


def _in_order(x: torch.Tensor) -> torch.Tensor:
    """Tokens one after another. ComfyUI gives a view of the embedding, channel after channel, and holds that until the
    first block has ended: its memory (0.7 GiB at 1280x720, 81 frames) is given back here."""
    tokens = x.contiguous()
    if tokens is not x:
        x.untyped_storage().resize_(0)
    return tokens


def _modulation(e: torch.Tensor, tokens: int) -> torch.Tensor | TokenModulation:
    """ComfyUI repeats each of `runs` rows over tokens / runs neighbouring tokens, rounded up."""
    runs = e.shape[1]
    if e.ndim == 3 or runs == 1:
        return e.reshape(e.shape[0], 6, -1)
    each = -(-tokens // runs)
    lengths = [max(0, min(each, tokens - start * each)) for start in range(runs)]
    return TokenModulation(e, tuple(lengths))
