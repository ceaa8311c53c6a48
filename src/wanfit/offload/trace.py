"""What the weight path did: counts for reports, and the last steps in order."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

Key = tuple[int, int]
"""(number of the expert, number of the block)."""

_KEPT = 4096


class Step(NamedTuple):
    """One step: `read` file -> host, `stage` host -> pinned ring, `upload` host -> device, `enter`, `exit`, `switch`.

    `place` names the buffer: `cache`, `stage 0`, `resident`, `slot 1` ...
    """

    action: str
    key: Key
    place: str


@dataclass
class Trace:
    """The last few thousand steps (a pass of 40 blocks has about 200), and totals since the start.

    Steps come from the thread that computes and from the one that reads, in the order in which they were begun.
    """

    steps: deque[Step] = field(default_factory=lambda: deque[Step](maxlen=_KEPT))
    counts: Counter[str] = field(default_factory=Counter[str])
    notices: list[str] = field(default_factory=list[str])

    def add(self, action: str, key: Key, place: str) -> None:
        self.steps.append(Step(action, key, place))
        self.counts[action] += 1

    def notice(self, text: str) -> None:
        """Something a user should read, once."""
        if text not in self.notices:
            self.notices.append(text)

    def of(self, *actions: str) -> list[Step]:
        """The kept steps of these kinds, in order."""
        return [step for step in list(self.steps) if step.action in actions]
