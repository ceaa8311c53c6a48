"""Where the blocks of one loader's models live: shared by both experts and all clones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import psutil
import torch

from ...src.wanfit.blocks import WeightSource
from ...src.wanfit.checkpoint import Checkpoint
from ...src.wanfit.memory.demand import RING
from ...src.wanfit.memory.parts import transformer_part
from ...src.wanfit.offload import BlockStore, MappedBlocks
from .convert import Fp8Blocks
from .policy import Policy

_HOST_RESERVE = 4 * 2**30
"""RAM that block copies leave to everything else when no budget is given."""


class Placement:
    """Makes the engine's block store when a device is known; on the CPU blocks are read in place.

    Args:
        checkpoints: one for each expert. to_fp8: their blocks' wide matrices become fp8 when they are first read.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], *, to_fp8: bool = False) -> None:
        self._tensors = [Fp8Blocks(checkpoint) if to_fp8 else checkpoint for checkpoint in checkpoints]
        self._converted = to_fp8
        self.parts = [transformer_part(c, held.tensors) for c, held in zip(checkpoints, self._tensors, strict=True)]
        """Each expert as the engine's plan knows it."""
        self._store: BlockStore | None = None
        self._key: tuple[torch.device, Policy] | None = None
        self._close_store: Callable[[], object] = _nothing

    @property
    def slot_bytes(self) -> int:
        """The largest block, as it is placed."""
        return max(part.block_bytes for part in self.parts)

    def source(self, expert: int, device: torch.device, policy: Policy, weight_budget: int) -> WeightSource:
        """The weights of one expert on `device`.

        Args:
            weight_budget: bytes of device memory for blocks.

        Raises:
            BudgetError: the budget does not hold what the policy needs.
        """
        if device.type == "cpu":
            return MappedBlocks(self._tensors[expert], device)
        if self._store is None or self._key != (device, policy):
            self.close()
            self._store = BlockStore(
                self._tensors,
                device,
                policy=policy.mode,
                vram_budget=weight_budget,
                ram_budget=self.ram_budget(policy),
                ring=RING,
            )
            self._key = (device, policy)
            self._close_store = weakref.finalize(self, self._store.close)
        elif policy.mode == "auto":
            self._store.shrink(max(0, weight_budget // self.slot_bytes - RING))
        return self._store.source(expert)

    @property
    def store(self) -> BlockStore | None:
        """The engine's store, when one is in use."""
        return self._store

    def release_device(self) -> None:
        """Give back all device memory; host copies stay for the next run."""
        if self._store is not None:
            self._store.release_device()

    def release_host(self) -> int:
        """Give back device and host memory; returns the host bytes."""
        if self._store is None:
            return 0
        held = self._store.report.host_bytes
        self.close()
        return held

    def close(self) -> None:
        """End the store and its reading thread."""
        self._close_store()
        self._store = self._key = None
        self._close_store = _nothing

    def ram_budget(self, policy: Policy) -> int:
        """Bytes of RAM that copies of blocks may take now."""
        if self._converted:
            return 0
        return policy.ram_bytes or max(0, psutil.virtual_memory().available - _HOST_RESERVE)


def _nothing() -> None:
    return
