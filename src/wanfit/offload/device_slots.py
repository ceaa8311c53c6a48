"""Device buffers: one for each block that stays, and a ring for the rest."""

from __future__ import annotations

from collections.abc import Collection

from .lane import Lane, Slot
from .trace import Key


class DeviceSlots:
    """Equal buffers, taken when first needed and reused by all experts.

    Args:
        nbytes: the largest block of any expert. ring: buffers for passing blocks.
    """

    def __init__(self, lane: Lane, nbytes: int, ring: int) -> None:
        self._lane, self.slot_bytes, self._ring_size = lane, nbytes, ring
        self._ring: list[Slot] = []
        self._resident: list[Slot] = []

    @property
    def nbytes(self) -> int:
        """Bytes taken on the device."""
        return self.slot_bytes * (len(self._ring) + len(self._resident))

    def get(self, key: Key) -> Slot | None:
        """The buffer that holds a block, or is being filled with it."""
        return next((slot for slot in (*self._resident, *self._ring) if slot.key == key), None)

    def room(self, key: Key, resident: Collection[Key], keep: Collection[Key]) -> Slot:
        """A buffer for a block: of its own if it is in `resident`, else of the ring, of none that is in `keep`.

        Of the ring the one that was filled first: its last use is over soonest, and the copy waits for that.

        Raises:
            torch.OutOfMemoryError: the buffer had to be taken and there is no room.
        """
        if key in resident:
            slot = next((s for s in self._resident if s.key not in resident), None)
            if slot is None:
                slot = self._lane.new_slot(self.slot_bytes, "resident")
                self._resident.append(slot)
        elif len(self._ring) < self._ring_size:
            taken = {s.name for s in self._ring}
            name = next(name for i in range(self._ring_size) if (name := f"slot {i}") not in taken)
            slot = self._lane.new_slot(self.slot_bytes, name)
            self._ring.append(slot)
        else:
            slot = next(s for s in self._ring if s.key is None or s.key not in keep)
            self._ring.remove(slot)
            self._ring.append(slot)
        slot.key = None
        return slot

    def empty(self) -> None:
        """Forget what is in the buffers and keep them."""
        for slot in (*self._resident, *self._ring):
            slot.key = None

    def promote(self, resident: Collection[Key]) -> None:
        """Blocks of the ring that are to stay do so where they are; the ring takes a new buffer."""
        for slot in [s for s in self._ring if s.key in resident]:
            self._ring.remove(slot)
            slot.name = "resident"
            self._resident.append(slot)

    def trim(self, resident: Collection[Key]) -> None:
        """Give back the buffers of blocks that no longer stay."""
        for slot in [s for s in self._resident if s.key not in resident]:
            self._lane.retire(slot)
            self._resident.remove(slot)

    def release(self) -> None:
        """Give all buffers back."""
        for slot in (*self._resident, *self._ring):
            self._lane.retire(slot)
        self._resident.clear()
        self._ring.clear()
