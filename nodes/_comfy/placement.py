"""Where the blocks of one loader's models live: shared by both experts and all clones."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import psutil
import torch

from ...src.wanfit.blocks import WeightSource
from ...src.wanfit.checkpoint import Checkpoint
from ...src.wanfit.offload import BlockStore, MappedBlocks
from .convert import Fp8Blocks
from .policy import Policy

RING = 2
_HOST_RESERVE = 4 * 2**30
"""RAM that block copies leave to everything else when no budget is given."""


class Placement:
    """Makes the engine's block store when a device is known; on the CPU blocks are read in place.

    Args:
        tensors: one checkpoint for each expert.
    """

    def __init__(self, tensors: Sequence[Checkpoint | Fp8Blocks]) -> None:
        self._tensors = list(tensors)
        self._converted = any(isinstance(t, Fp8Blocks) for t in tensors)
        self.sizes = [_block_sizes(t) for t in tensors]
        self._store: BlockStore | None = None
        self._key: tuple[torch.device, Policy] | None = None
        self._close_store: Callable[[], object] = _nothing

    @property
    def slot_bytes(self) -> int:
        """The largest block, as it is placed."""
        return max(max(sizes) for sizes in self.sizes)

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


def _block_sizes(tensors: Checkpoint | Fp8Blocks) -> list[int]:
    """Bytes of each block as it is placed: in fp8 for a converted one."""
    totals: dict[int, int] = {}
    for name, info in tensors.tensors.items():
        if name.startswith("blocks."):
            index = int(name.split(".")[1])
            fp8 = isinstance(tensors, Fp8Blocks) and len(info.shape) == 2
            totals[index] = totals.get(index, 0) + (info.shape[0] * info.shape[1] if fp8 else info.nbytes)
    return [totals[index] for index in sorted(totals)]
