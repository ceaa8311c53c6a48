"""The transformers of one model, of which at most one holds memory at any time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..blocks import Choice, ForwardSettings, WeightSource, choose_attention
from ..checkpoint import Checkpoint, Identity
from ..memory.alarm import Alarm
from ..memory.plan import Plan
from ..memory.purge import empty_device_cache
from ..offload import BlockStore, Ladder, MappedBlocks
from .loras import ModelPatches
from .opened import OpenTransformers
from .placement import Placement
from .transformer import LeanTransformer, build_transformer


@dataclass
class Expert:
    """One transformer and the file that its weights are read from."""

    name: str
    checkpoint: Checkpoint
    transformer: LeanTransformer


def attention_of(identity: Identity, placement: Placement, plan: Plan) -> Choice:
    """The attention that a run takes; measured by the first call for a card and shape.

    Raises:
        InputError: attention_unavailable.
    """
    head_dim = identity.dim // identity.num_heads
    return choose_attention(placement.attention, placement.device, placement.dtype, head_dim, plan.video.tokens)


class Experts:
    """Builds the transformers empty and brings in the one whose forward is called; the other is let go first.

    On the CPU the blocks are read in place from the files; on a device they go through a `BlockStore`, which both
    experts share.

    Args:
        transformers: (name, open file) of each, in the order in which they run: high, then low.
        plan: says the chunk, what the blocks may take of device and host memory, and where LoRAs stay.
        on_switch: called with an expert's name before its weights are read.
        on_tighter: told what was tightened because memory was out, or about to be.
        patches: LoRAs, in the order of `transformers`; empty for none.
        alarm: asked before each block.
    """

    def __init__(
        self,
        transformers: OpenTransformers,
        placement: Placement,
        plan: Plan,
        on_switch: Callable[[str], None],
        on_tighter: Callable[[str], None],
        patches: Sequence[ModelPatches] = (),
        alarm: Alarm | None = None,
    ) -> None:
        self._placement, self._on_switch = placement, on_switch
        self.experts: list[Expert] = []
        self.active: Expert | None = None
        self.store: BlockStore | None = None
        files = [checkpoint for _, checkpoint in transformers]
        self.attention = attention_of(files[0].identity, placement, plan)
        settings = ForwardSettings(
            plan.chunk_tokens, attention=self.attention.backend, float8_matmul=placement.float8_matmul
        )
        if placement.device.type != "cpu":
            self.store = BlockStore(
                files,
                placement.device,
                policy=placement.policy,
                vram_budget=plan.weights_budget,
                ram_budget=plan.ram_budget,
            )
        ladder = Ladder(settings, self.store, on_tighter, alarm)
        for index, (name, checkpoint) in enumerate(transformers):
            source: WeightSource = (
                MappedBlocks(checkpoint, placement.device) if self.store is None else self.store.source(index)
            )
            transformer = build_transformer(checkpoint, source, ladder, placement.dtype)
            transformer.patches = patches[index] if patches else None
            transformer.keep_patches = plan.keep_loras
            expert = Expert(name, checkpoint, transformer)
            transformer.before_forward = lambda _, expert=expert: self.activate(expert)
            self.experts.append(expert)

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

    @property
    def notices(self) -> tuple[str, ...]:
        """What the weight path could not do as asked, such as pinning host memory."""
        return () if self.store is None else self.store.report.notices

    def close(self) -> None:
        """Release all weights."""
        for expert in self.experts:
            expert.transformer.release()
        if self.store is not None:
            self.store.close()
        self.experts.clear()
        self.active = None
        empty_device_cache(self._placement.device)
