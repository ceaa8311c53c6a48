"""Whether the stages of a plan fit, and the sentence that says why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from ..errors import BudgetError
from .demand import SAVING, VIDEO, Demand
from .machine import GIB, Machine

TIGHT = 0.95
"""Of a limit: what needs more fits, and may run slower or fail when another program takes memory."""

KEPT = "blocks kept in RAM"

Verdict = Literal["fits", "tight", "does not fit"]


def room_of(machine: Machine) -> int:
    return machine.vram if machine.device == "cuda" else machine.ram


def verdict(
    stages: Sequence[Demand], machine: Machine, failures: Mapping[str, BudgetError]
) -> tuple[Verdict, str, str]:
    tight: tuple[str, str] | None = None
    for stage in stages:
        if stage.name in failures:
            return "does not fit", stage.name, _tiles_too_large(failures[stage.name], stage, machine)
        for kind, needed, room in limits(stage, machine):
            if needed > room:
                what = (
                    f"{stage.name} needs {needed / GIB:.2f} GiB of {kind} for {', '.join(_largest(stage, kind))} ...; "
                    f"{room / GIB:.2f} GiB are there"
                )
                return "does not fit", stage.name, what
            if needed > room * TIGHT and tight is None:
                tight = stage.name, f"{stage.name} needs {needed / GIB:.2f} of {room / GIB:.2f} GiB of {kind}"
    return ("tight", *tight) if tight else ("fits", "", "")


def _tiles_too_large(error: BudgetError, stage: Demand, machine: Machine) -> str:
    """The VAE's own words, without its budget: what lies beside the pass is no news to it."""
    beside = sum(n for cause, n in (stage.vram or stage.ram).items() if cause in (VIDEO, *SAVING))
    others = f" beside {beside / GIB:.2f} GiB of frames" if beside else ""
    kind = "VRAM" if machine.device == "cuda" else "RAM"
    return (
        f"{error.what.partition('; <budget_bytes>')[0]}{others}; {room_of(machine) / GIB:.2f} GiB of {kind} are there"
    )


def limits(stage: Demand, machine: Machine) -> list[tuple[str, int, int]]:
    """(what, needed, there): what a stage must stay within."""
    limits = [("RAM", _must(stage.ram), machine.ram)]
    if machine.device == "cuda":
        # All blocks have to be there with the policy `resident`; otherwise those that stay give way.
        vram = stage.vram_peak if machine.policy == "resident" else stage.vram_needed
        limits.insert(0, ("VRAM", vram, machine.vram))
    if machine.commit is not None:
        limits.append(("memory that the system can promise (page file, ulimit -v)", _must(stage.ram), machine.commit))
    return limits


def within(stage: Demand, machine: Machine) -> bool:
    """Whether the stage stays within all of them."""
    return all(needed <= room for _, needed, room in limits(stage, machine))


def _must(ram: Mapping[str, int]) -> int:
    """RAM that a stage cannot do without: the blocks that are kept there are not part of it."""
    return sum(nbytes for cause, nbytes in ram.items() if cause != KEPT)


def _largest(stage: Demand, kind: str) -> list[str]:
    causes = stage.vram if kind == "VRAM" else stage.ram
    ordered = sorted(causes.items(), key=lambda item: -item[1])[:3]
    return [f"{cause} {nbytes / GIB:.2f}" for cause, nbytes in ordered]
