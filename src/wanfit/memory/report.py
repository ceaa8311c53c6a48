"""A plan in words and tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .allocator import Finding
from .demand import Demand
from .plan import GIB, Plan
from .record import PlannedPeak

_MARKS = {"ok": " ", "note": "-", "warning": "!", "wrong": "X", "unread": "?"}

_SHOWN = 4
"""Causes named in a line of the table; the rest is summed up."""


def plan_lines(plan: Plan) -> list[str]:
    """Machine, stages, causes, verdict."""
    video, machine = plan.video, plan.machine
    lines = [
        f"{video.width}x{video.height}, {video.num_frames} frames ({video.tokens:,} tokens), "
        f"{str(machine.dtype).removeprefix('torch.')}"
        + (f", {video.batch} videos at a time" if video.batch > 1 else "")
        + (", q, k and v packed in 8 bits" if plan.packed_attention else ""),
        _room("VRAM", machine.vram, machine.vram_taken) if machine.device == "cuda" else "VRAM: none, on the CPU",
        _room("RAM", machine.ram, machine.ram_taken),
        "",
    ]
    rows = [("stage", "VRAM needed", "VRAM at most", "RAM", "files in place")]
    for stage in plan.stages:
        cuda = machine.device == "cuda"
        rows.append(
            (
                stage.name,
                _gib(stage.vram_needed) if cuda else "-",
                _gib(stage.vram_peak) if cuda else "-",
                _gib(stage.ram_needed),
                _gib(stage.mapped),
            )
        )
    lines += table(rows)
    lines.append("")
    for stage in plan.stages:
        for kind, causes in (("VRAM", stage.vram), ("RAM", stage.ram)):
            ordered = sorted(causes.items(), key=lambda item: -item[1])
            if not ordered:
                continue
            shown = [f"{cause} {nbytes / GIB:.2f}" for cause, nbytes in ordered[:_SHOWN]]
            rest = sum(nbytes for _, nbytes in ordered[_SHOWN:])
            if kind == "VRAM" and stage.optional:
                shown.append(f"{staying(plan)} {stage.optional / GIB:.2f}")
            shown += [f"other {rest / GIB:.2f}"] if rest else []
            lines.append(f"{stage.name}, {kind} GiB: {', '.join(shown)}")
    lines += ["", *_traffic(plan), f"verdict: {plan.verdict}{f' ({plan.reason})' if plan.reason else ''}"]
    return lines


def plan_line(plan: Plan) -> str:
    """The verdict and the stage that needs most, in one line."""
    kind = "VRAM" if plan.machine.device == "cuda" else "RAM"
    needs = {stage.name: stage.vram_needed if kind == "VRAM" else stage.ram_needed for stage in plan.stages}
    most = max(needs, key=lambda name: needs[name])
    room = plan.machine.vram if kind == "VRAM" else plan.machine.ram
    said = f"plan: {plan.verdict}; {most} needs most: {_gib(needs[most])} of {_gib(room)} {kind}"
    if plan.resident:
        said += f", {staying(plan)} on the device"
    return f"{said}, {plan.chunk_tokens} tokens at a time" + (f"; {plan.reason}" if plan.reason else "")


def planned_peaks(plan: Plan) -> dict[str, PlannedPeak]:
    """For the memory record, by its stages: the switch is the beginning of the second expert's stage."""
    peaks: dict[str, PlannedPeak] = {}
    waiting: Demand | None = None
    for stage in plan.stages:
        if stage.name == "switch":
            waiting = stage
            continue
        both = [stage] if waiting is None else [stage, waiting]
        waiting = None
        peaks[stage.name] = PlannedPeak(
            max(each.vram_needed for each in both),
            max(each.vram_peak for each in both),
            max(each.ram_needed for each in both),
        )
    return peaks


def finding_lines(findings: Sequence[Finding]) -> list[str]:
    """What the doctor found, under its topics, with what the marks mean."""
    lines: list[str] = []
    topic = ""
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            lines.append(topic)
        lines.append(f"  {_MARKS[finding.state]} {finding.text}")
    return [*lines, "! warning, X wrong, ? not readable here, - for information"]


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns: the first to the left, the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _room(name: str, room: int, taken: Mapping[str, int]) -> str:
    parts = [f"{cause} {nbytes / GIB:.2f}" for cause, nbytes in taken.items()]
    beside = f" beside {', '.join(parts)}" if parts else ""
    return f"{name}: {room / GIB:.2f} GiB for the run{beside}"


def staying(plan: Plan) -> str:
    """`auto` keeps as many as it must, which the plan knows where it knows the speeds."""
    if plan.resident_least == plan.resident:
        return f"{plan.resident} blocks that stay"
    return f"{plan.resident_least} to {plan.resident} blocks that stay"


def _traffic(plan: Plan) -> list[str]:
    traffic = plan.traffic
    if traffic is None:
        return []
    least = "at least " if plan.resident_least < plan.resident else ""
    said = f"each forward copies {least}{traffic.copied / GIB:.2f} GiB of blocks from RAM"
    if traffic.read:
        said += f", {traffic.read / GIB:.2f} GiB of them from disk first"
    if traffic.seconds is not None:
        said += f": {traffic.seconds:.2f} s"
    if traffic.slowdown is not None:
        hidden = "hidden behind the computation" if traffic.slowdown == 1 else f"{traffic.slowdown:.2f} times as long"
        said += f", {hidden}"
    return [said]


def _gib(nbytes: int) -> str:
    return f"{nbytes / GIB:.2f} GiB"
