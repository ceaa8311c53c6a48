"""The transformers of one model, of which at most one holds memory at any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..blocks import ForwardSettings, WeightSource, activation_bytes
from ..checkpoint import Checkpoint, open_checkpoint
from ..memory.device import free_bytes
from ..memory.host import available_bytes
from ..memory.purge import empty_device_cache
from ..offload import BlockStore, Ladder, MappedBlocks
from .loras import ModelPatches
from .placement import Placement
from .transformer import LeanTransformer, block_shape, build_transformer

RAM_SHARE = 0.6
"""Of the host memory that is free, what the blocks of both experts may take; the rest stays for frames and others."""

LORA_SHARE = 0.25
"""Of the device memory for weights, what LoRAs may take to stay there; larger ones are copied with each block."""


@dataclass
class Expert:
    """One transformer and the file that its weights are read from."""

    name: str
    checkpoint: Checkpoint
    transformer: LeanTransformer


class Experts:
    """Builds the transformers empty and brings in the one whose forward is called; the other is let go first.

    On the CPU the blocks are read in place from the files; on a device they go through a `BlockStore`, which both
    experts share.

    Args:
        paths: (name, file) of each, in the order in which they run: high, then low.
        tokens: of one forward, for the part of device memory that is left to weights.
        on_switch: called with an expert's name before its weights are read.
        on_tighter: told when a forward ran out of memory and what was tightened.
        patches: LoRAs, in the order of `paths`; empty for none.
    """

    def __init__(
        self,
        paths: list[tuple[str, Path]],
        placement: Placement,
        tokens: int,
        on_switch: Callable[[str], None],
        on_tighter: Callable[[str], None],
        patches: Sequence[ModelPatches] = (),
    ) -> None:
        self._placement, self._on_switch = placement, on_switch
        self.experts: list[Expert] = []
        self.active: Expert | None = None
        self.store: BlockStore | None = None
        self._patches, self._keep_patches = patches, False
        files: list[Checkpoint] = []
        try:
            files.extend(open_checkpoint(path) for _, path in paths)
            settings = ForwardSettings(chunk_tokens=placement.chunk_tokens)
            if placement.device.type != "cpu":
                self.store = self._make_store(files, settings, tokens)
            ladder = Ladder(settings, self.store, on_tighter)
            for index, ((name, _), checkpoint) in enumerate(zip(paths, files, strict=True)):
                source: WeightSource = (
                    MappedBlocks(checkpoint, placement.device) if self.store is None else self.store.source(index)
                )
                transformer = build_transformer(checkpoint, source, ladder, placement.dtype)
                transformer.patches = patches[index] if patches else None
                transformer.keep_patches = self._keep_patches
                expert = Expert(name, checkpoint, transformer)
                transformer.before_forward = lambda _, expert=expert: self.activate(expert)
                self.experts.append(expert)
        except BaseException:
            for checkpoint in files:
                checkpoint.close()
            raise

    def _make_store(self, files: list[Checkpoint], settings: ForwardSettings, tokens: int) -> BlockStore:
        place = self._placement
        identity = files[0].identity
        rest = max(_rest_parameters(file) for file in files) * place.dtype.itemsize
        work = activation_bytes(block_shape(identity), settings, batch=1, tokens=tokens, itemsize=place.dtype.itemsize)
        total = free_bytes(place.device) if place.vram_budget is None else place.vram_budget
        room = total - rest - work
        lora = max((patch.nbytes(place.dtype) for patch in self._patches), default=0)
        self._keep_patches = lora <= room * LORA_SHARE
        if not self._keep_patches:
            lora = max((patch.largest(place.dtype) for patch in self._patches), default=0)
        return BlockStore(
            files,
            place.device,
            policy=place.policy,
            vram_budget=max(0, room - lora),
            ram_budget=int(available_bytes() * RAM_SHARE) if place.ram_budget is None else place.ram_budget,
        )

    def activate(self, expert: Expert) -> None:
        """Make `expert` the one that holds memory."""
        if self.active is expert:
            return
        self._on_switch(expert.name)
        if self.active is not None:
            self.active.transformer.release()
            empty_device_cache(self._placement.device)
        expert.transformer.load_rest(expert.checkpoint, self._placement.device, self._placement.dtype)
        self.active = expert

    def close(self) -> None:
        """Release all weights and close the files."""
        for expert in self.experts:
            expert.transformer.release()
        if self.store is not None:
            self.store.close()
        for expert in self.experts:
            expert.checkpoint.close()
        self.experts.clear()
        self.active = None
        empty_device_cache(self._placement.device)


def _rest_parameters(checkpoint: Checkpoint) -> int:
    """Parameters outside the blocks."""
    return sum(
        torch.Size(info.shape).numel() for name, info in checkpoint.tensors.items() if not name.startswith("blocks.")
    )
