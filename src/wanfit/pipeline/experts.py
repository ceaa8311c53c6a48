"""The transformers of one model, of which at most one holds memory at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..blocks import ForwardSettings
from ..checkpoint import Checkpoint, open_checkpoint
from ..memory.purge import empty_device_cache
from ..offload import MappedBlocks
from .transformer import LeanTransformer, build_transformer


@dataclass
class Expert:
    """One transformer and the file that its weights are read from."""

    name: str
    checkpoint: Checkpoint
    transformer: LeanTransformer


@dataclass
class Experts:
    """Builds the transformers empty and brings in the one whose forward is called; the other is let go first.

    Args:
        paths: (name, file) of each, in the order in which they run: high, then low.
        on_switch: called with an expert's name before its weights are read.
    """

    paths: list[tuple[str, Path]]
    settings: ForwardSettings
    device: torch.device
    dtype: torch.dtype
    on_switch: Callable[[str], None]
    active: Expert | None = None
    experts: list[Expert] = field(default_factory=list[Expert])

    def open(self) -> None:
        """Open the files and build the transformers; no weight is read."""
        for name, path in self.paths:
            checkpoint = open_checkpoint(path)
            source = MappedBlocks(checkpoint, self.device)
            transformer = build_transformer(checkpoint, source, self.settings, self.dtype)
            expert = Expert(name, checkpoint, transformer)
            transformer.before_forward = lambda _, expert=expert: self.activate(expert)
            self.experts.append(expert)

    def activate(self, expert: Expert) -> None:
        """Make `expert` the one that holds memory."""
        if self.active is expert:
            return
        self.on_switch(expert.name)
        if self.active is not None:
            self.active.transformer.release()
            empty_device_cache(self.device)
        expert.transformer.load_rest(expert.checkpoint, self.device, self.dtype)
        self.active = expert

    def close(self) -> None:
        """Release all weights and close the files."""
        for expert in self.experts:
            expert.transformer.release()
            expert.checkpoint.close()
        self.experts.clear()
        self.active = None
        empty_device_cache(self.device)
