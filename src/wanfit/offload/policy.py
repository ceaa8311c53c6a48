"""How many blocks stay on the device, and which."""

from __future__ import annotations

import math
from typing import Literal

Policy = Literal["resident", "stream", "auto"]

MARGIN = 1.1
"""Transfers are planned this much slower than measured: a slot is busy while its block computes."""


def spread(count: int) -> list[int]:
    """0 ... count - 1 in an order of which every beginning is spread evenly over the whole range.

    Blocks that stay are taken from the front: between them there is always time to bring in others, and a larger
    number keeps all blocks of a smaller one.
    """
    bits = max(1, (count - 1).bit_length())
    reversed_bits = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits))
    return [index for index in reversed_bits if index < count]


def blocks_to_hide(count: int, copy_seconds: float, block_seconds: float) -> int:
    """How many of `count` blocks must stay on the device so that copies take no longer than the computation.

    Args:
        copy_seconds: one block from the host to the device. block_seconds: one block's forward.
    """
    if copy_seconds <= 0:
        return 0
    streamable = count * block_seconds / (copy_seconds * MARGIN)
    return min(count, max(0, math.ceil(count - streamable)))


def beyond_ring(resident: int, ring: int, count: int) -> int:
    """Buffers besides a whole ring when `resident` of `count` blocks stay; when nearly all do, less of it is taken."""
    return min(resident, count - ring)


def resident_within(budget: int | None, slot_bytes: int, ring: int, count: int) -> int:
    """The most blocks that fit into `budget` bytes beside a ring of `ring` slots, or without one if all fit."""
    if budget is None or budget >= slot_bytes * count:
        return count
    return min(count, max(0, budget // slot_bytes - ring))
