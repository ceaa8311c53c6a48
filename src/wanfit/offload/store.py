"""The weight path: file -> host memory -> device, for the blocks of one or more experts.

store = BlockStore([high, low], device, policy="auto", vram_budget=4 * 2**30, ram_budget=16 * 2**30)
transformer = build_transformer(high, store.source(0), ...)      # a WeightSource for each expert
...                                                              # forwards; the expert that runs is brought in
store.release_device()                                           # before the decode
store.close()
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import TracebackType

import torch

from ..errors import BudgetError
from ..quant import StoredWeight
from .device_slots import DeviceSlots
from .host_blocks import HostBlocks
from .lane import Slot, Speed, lane_for
from .layout import BlockFile, Blocks, StoredTensors
from .policy import Policy, blocks_to_hide, resident_within, spread
from .trace import Key, Trace

_GIB = 2**30


@dataclass(frozen=True)
class OffloadReport:
    """What was taken, and what was measured; sizes in bytes."""

    policy: Policy
    blocks: int
    resident: int
    slot_bytes: int
    device_bytes: int
    host_bytes: int
    pinned_bytes: int
    speed: Speed | None
    notices: tuple[str, ...]


class BlockStore:
    """Owns the device buffers and the host memory that all experts share. Used by one thread.

    One expert is on the device at a time: the first block asked of another one takes over all device buffers, and
    its host places as far as the RAM budget needs them. Places that the running expert leaves free are filled with
    the next one's blocks meanwhile. Weights are only ever read.

    Args:
        checkpoints: one for each expert, or its blocks; their layouts may differ.
        device: where blocks are computed. On the CPU the same steps run, with plain copies.
        policy: `resident` keeps all blocks on the device; `stream` none; `auto` as many as are needed to hide the
            copies, by what was measured in the passes before, and no more than `vram_budget` holds.
        vram_budget: bytes for weights on the device; None for no limit.
        ram_budget: bytes of host memory. At least the ring of two blocks is used.
        ring: device buffers for passing blocks, two or more.

    Raises:
        BudgetError: budget_exceeded: `vram_budget` does not hold what the policy needs.
        CheckpointError: tensors_missing: a checkpoint has no complete list of blocks.

    Memory: device: (resident + ring) x the largest block. Host: no more than `ram_budget`, or two blocks.
    """

    def __init__(
        self,
        checkpoints: Sequence[StoredTensors | Blocks],
        device: torch.device,
        *,
        policy: Policy = "auto",
        vram_budget: int | None = None,
        ram_budget: int = 0,
        ring: int = 2,
    ) -> None:
        self._files = [BlockFile(c) if isinstance(c, StoredTensors) else c for c in checkpoints]
        self.policy: Policy = policy
        self.trace = Trace()
        self._lane = lane_for(device)
        self._ring = ring
        self._vram_budget = vram_budget
        slot_bytes = max(file.largest for file in self._files)
        self._slots = DeviceSlots(self._lane, slot_bytes, ring)
        total = sum(len(file) for file in self._files)
        self._host = HostBlocks(
            self._files, *_host_sizes(ram_budget, slot_bytes, total, ring), self._lane.pin_for, self.trace
        )
        self._check_budget(slot_bytes)
        self._resident_count = max(len(file) for file in self._files) if policy == "resident" else 0
        self._resident_limit: int | None = None
        self._active: int | None = None
        self._resident: frozenset[Key] = frozenset()
        self._last = -1

    def source(self, expert: int = 0) -> BlockSource:
        """The `WeightSource` of one expert's transformer."""
        return BlockSource(self, expert)

    @property
    def resident_count(self) -> int:
        """Blocks of the running expert that stay on the device."""
        return self._resident_count

    def shrink(self, resident: int) -> None:
        """Keep no more than `resident` blocks on the device from now on, whatever the policy; frees the rest."""
        self._resident_limit = resident
        self._set_resident(min(self._resident_count, resident))
        self._slots.trim(self._resident)

    def shrink_host(self) -> int:
        """Keep half as many blocks in host memory from now on; returns the bytes given back, 0 when none are kept."""
        return self._host.shrink()

    def release_device(self) -> None:
        """Give back all device memory, for the work after the sampling. The next block asked for takes it again."""
        self._lane.drain()
        self._slots.release()

    def release(self) -> None:
        """Give back all memory of device and host."""
        self.release_device()
        self._host.release()
        self._active = None

    def close(self) -> None:
        """As `release`, and end the reading thread. No view of a file is kept."""
        self.release_device()
        self._host.close()
        self._active = None

    def __enter__(self) -> BlockStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    @property
    def report(self) -> OffloadReport:
        return OffloadReport(
            self.policy,
            len(self._files[self._active or 0]),
            self._resident_count,
            self._slots.slot_bytes,
            self._slots.nbytes,
            self._host.cache.nbytes + self._host.stage_bytes,
            self._host.pinned_bytes,
            self._lane.speed(),
            tuple(self.trace.notices),
        )

    @contextmanager
    def onload(self, expert: int, index: int) -> Generator[Mapping[str, StoredWeight]]:
        """Block `index` of an expert on the device for the time of the `with`; the next ones are on their way."""
        if expert != self._active:
            self._switch(expert)
        if index <= self._last:
            self._adapt()
        self._last = index
        key = (expert, index)
        slot = self._slots.get(key) or self._upload(key)
        self._lane.acquire(slot)
        self.trace.add("enter", key, slot.name)
        self._look_ahead(index, pinned_only=True)
        try:
            yield self._files[expert].layouts[index].view(slot.buffer)
        finally:
            self._lane.release(slot)
            self.trace.add("exit", key, slot.name)
        self._look_ahead(index, pinned_only=False)

    def _check_budget(self, slot_bytes: int) -> None:
        count = max(len(file) for file in self._files)
        needed = slot_bytes * (count if self.policy == "resident" else min(self._ring, count))
        if self._vram_budget is not None and self._vram_budget < needed:
            raise BudgetError(
                "budget_exceeded",
                "plan",
                f"Policy {self.policy} needs {needed / _GIB:.2f} GiB of device memory for transformer blocks and has "
                f"{self._vram_budget / _GIB:.2f} GiB",
                "Take the policy stream, or a smaller file (fp8, Q5_K, Q4_K)",
            )

    def _switch(self, expert: int) -> None:
        self.trace.add("switch", (expert, 0), "device")
        self._slots.empty()
        self._active, self._last = expert, -1
        self._set_resident(self._resident_count)

    def _set_resident(self, count: int) -> None:
        if self._active is None:
            self._resident_count = count
            return
        blocks = spread(len(self._files[self._active]))
        count = min(count, len(blocks))
        self._resident_count = count
        self._resident = frozenset((self._active, index) for index in blocks[:count])
        self._slots.promote(self._resident)
        self._host.prefer((self._active, index) for index in (*blocks[count:], *blocks[:count]))

    def _adapt(self) -> None:
        """Between two passes: let `auto` keep more blocks when copies take longer than the computation."""
        if self.policy != "auto" or self._active is None:
            return
        speed = self._lane.speed()
        if speed is None:
            return
        count = len(self._files[self._active])
        slot_bytes = self._slots.slot_bytes
        wanted = blocks_to_hide(count, slot_bytes / speed.bandwidth, speed.block_seconds)
        limit = resident_within(self._vram_budget, slot_bytes, self._ring, count)
        if self._resident_limit is not None:
            limit = min(limit, self._resident_limit)
        if self._resident_count < min(wanted, limit):
            self._set_resident(min(wanted, limit))

    def _window(self, index: int) -> list[Key]:
        """Blocks that should be on the device while `index` is computed: as many of the next as the ring holds."""
        expert, count = self._active or 0, len(self._files[self._active or 0])
        keys: list[Key] = []
        passing = 0
        for step in range(count):
            key = (expert, (index + step) % count)
            if key not in self._resident:
                if passing == self._ring:
                    break
                passing += 1
            keys.append(key)
        return keys

    def _look_ahead(self, index: int, *, pinned_only: bool) -> None:
        """Begin to copy the next blocks as far as they are on the host, and to read the ones after them.

        A copy from pageable memory makes the caller wait for the slot's last use, so it is begun only when the
        block before it has been issued.
        """
        expert, count = self._active or 0, len(self._files[self._active or 0])
        window = self._window(index)
        for key in window:
            if self._slots.get(key) is None:
                if not self._host.ready(key) or (pinned_only and not self._host.copies_freely(key)):
                    break
                self._upload(key, window)
        for step in range(1, count):
            key = (expert, (index + step) % count)
            if self._slots.get(key) is None and not self._host.request(key):
                break
        if len(self._files) > 1 and not pinned_only:
            other = (expert + 1) % len(self._files)
            self._host.fill_free((other, step) for step in range(len(self._files[other])))

    def _upload(self, key: Key, keep: Sequence[Key] = ()) -> Slot:
        slot = self._slots.room(key, self._resident, keep or self._window(key[1]))
        block = self._host.take(key)
        self.trace.add("upload", key, slot.name)
        marker = self._lane.upload(slot, block)
        slot.key = key
        self._host.passed_on(key, marker)
        return slot


class BlockSource:
    """The blocks of one expert, as `wanfit.blocks.WeightSource`."""

    def __init__(self, store: BlockStore, expert: int) -> None:
        self._store, self._expert = store, expert

    def onload(self, index: int) -> AbstractContextManager[Mapping[str, StoredWeight]]:
        """Block `index` on the device for the time of the `with`."""
        return self._store.onload(self._expert, index)


def _host_sizes(ram_budget: int, block_bytes: int, blocks: int, ring: int) -> tuple[int, int]:
    """Places for blocks that are kept, and buffers of the ring for those that pass."""
    if ram_budget >= block_bytes * blocks:
        return blocks, ring
    return max(0, ram_budget // block_bytes - ring), ring
