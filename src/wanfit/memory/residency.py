"""The blocks' part of a plan: how many stay on the device and in RAM, and what the others cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..offload.policy import beyond_ring, blocks_to_hide, resident_within
from .demand import RING, Demand
from .machine import Machine
from .parts import Model

LORA_SHARE = 0.25
"""Of the device memory for weights, what LoRAs may take to stay there."""


@dataclass(frozen=True)
class Traffic:
    """Copies of blocks in one forward, and what they cost.

    Args:
        copied: bytes from RAM to the device. read: bytes from disk before that.
        seconds: of the copies and reads, where a speed is known.
        slowdown: time of a forward in units of its computation alone; 1.0: all copies are hidden; None: unknown.
    """

    copied: int
    read: int
    seconds: float | None
    slowdown: float | None


def keeps_loras(denoise: Sequence[Demand], machine: Machine, nbytes: int) -> bool:
    """Whether LoRAs take no more than their share of what is left beside the blocks that pass."""
    needed = max(demand.vram_needed for demand in denoise)
    return machine.device == "cpu" or nbytes <= LORA_SHARE * (machine.vram - needed)


def speeds_known(machine: Machine) -> bool:
    """Whether it can be said how many blocks `auto` keeps."""
    return machine.speeds is not None and machine.speeds.block_seconds is not None


def resident_blocks(model: Model, machine: Machine, worst: Demand) -> tuple[int, int]:
    """Device bytes for blocks, and how many blocks stay, at the most."""
    if machine.device == "cpu":
        return 0, 0
    count = max(part.num_layers for part in model.transformers)
    budget = max(0, machine.vram - (worst.vram_needed - RING * model.slot_bytes))
    if machine.policy == "stream":
        return budget, 0
    limit = resident_within(budget, model.slot_bytes, RING, count)
    if machine.policy == "resident":
        return budget, count
    speeds = machine.speeds
    if speeds is None or speeds.block_seconds is None:
        return budget, limit
    wanted = blocks_to_hide(count, model.slot_bytes / speeds.bandwidth, speeds.block_seconds)
    return budget, min(wanted, limit)


def optional_bytes(resident: int, slot_bytes: int, model: Model) -> int:
    """Device bytes that the blocks that stay take beyond a whole ring."""
    count = max(part.num_layers for part in model.transformers)
    return beyond_ring(resident, RING, count) * slot_bytes if resident else 0


def cached_blocks(ram_budget: int, slot_bytes: int, blocks: int) -> int:
    """Blocks that host memory keeps; as `offload.store` decides."""
    if ram_budget >= slot_bytes * blocks:
        return blocks
    return max(0, ram_budget // slot_bytes - RING)


def traffic_of(model: Model, machine: Machine, resident: int, cached: int) -> Traffic | None:
    """Of one forward in the long run; blocks that RAM does not keep come from disk each time."""
    if machine.device == "cpu":
        return None
    count, slot = max(part.num_layers for part in model.transformers), model.slot_bytes
    passing = count - resident
    read = max(0, passing - cached)  # the running expert's blocks take the places of the other one's
    copied_bytes, read_bytes = passing * slot, read * slot
    speeds = machine.speeds
    if speeds is None:
        return Traffic(copied_bytes, read_bytes, None, None)
    seconds = copied_bytes / speeds.bandwidth
    if read_bytes:
        if speeds.disk is None:
            return Traffic(copied_bytes, read_bytes, None, None)
        seconds = max(seconds, read_bytes / speeds.disk)  # reading and copying overlap
    if speeds.block_seconds is None:
        return Traffic(copied_bytes, read_bytes, seconds, None)
    return Traffic(copied_bytes, read_bytes, seconds, max(1.0, seconds / (count * speeds.block_seconds)))
