"""The lean forward as a module, over weights that come and go."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from ..quant.weight import StoredWeight
from .forward import block_forward
from .modulation import TokenModulation
from .patches import BlockPatches
from .settings import BlockShape, ForwardSettings


class WeightSource(Protocol):
    """Where a block's weights come from."""

    def onload(self, index: int) -> AbstractContextManager[Mapping[str, StoredWeight]]:
        """Block `index`'s weights on the compute device for the time of the `with`.

        The names are the original ones without `blocks.N.`. Nothing may be kept beyond the `with`.
        """
        ...


class PatchSource(Protocol):
    """Where the changes of a block's weights come from."""

    def onload(self, index: int) -> AbstractContextManager[BlockPatches]:
        """As `WeightSource.onload`."""
        ...


class LeanBlock(nn.Module):
    """Drop-in for diffusers' `WanTransformerBlock` without parameters of its own.

    `hidden_states` is updated in place: the caller must not need its old values. `settings` may be replaced
    between forwards, as when memory ran out and the next tighter ones are taken; so may `patches`.

    Args:
        index: the block's number, handed to `source`.
    """

    def __init__(self, index: int, source: WeightSource, shape: BlockShape, settings: ForwardSettings) -> None:
        super().__init__()
        self.index = index
        self.source = source
        self.shape = shape
        self.settings = settings
        self.patches: PatchSource | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        timestep_proj: torch.Tensor | TokenModulation,
        rotary_emb: tuple[torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        """As `WanTransformerBlock.forward`; `timestep_proj` may be a `TokenModulation` as well."""
        if self.settings.check_interrupt is not None:
            self.settings.check_interrupt()
        changes = nullcontext(BlockPatches()) if self.patches is None else self.patches.onload(self.index)
        with self.source.onload(self.index) as weights, changes as patches:
            return block_forward(
                hidden_states,
                patches.over(weights, encoder_hidden_states.dtype),
                self.shape,
                context=encoder_hidden_states,
                modulation=timestep_proj,
                rotary_emb=rotary_emb,
                settings=self.settings,
                adapters=patches.low_rank,
            )
