"""A picture of a plan: what each stage takes, by cause, against what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .plan import GIB, Plan
from .report import staying

_NAMED = 9
"""Causes with a colour of their own: those that take most in any stage."""


def draw_plan(plan: Plan, path: Path) -> None:
    """Write the chart of `plan` as a PNG to `path`: device memory, and RAM below it."""
    cuda = plan.machine.device == "cuda"
    kinds = ["VRAM", "RAM"] if cuda else ["RAM"]
    figure = Figure(figsize=(11, 0.45 * len(plan.stages) * len(kinds) + 2.4), layout="constrained")
    FigureCanvasAgg(figure)
    video = plan.video
    figure.suptitle(f"{video.width}x{video.height}, {video.num_frames} frames: {plan.verdict}")
    for axes, kind in zip(figure.subplots(len(kinds), 1, squeeze=False)[:, 0], kinds, strict=True):
        _draw_kind(axes, plan, kind)
    figure.savefig(path, dpi=110, format="png")


def _draw_kind(axes: Any, plan: Plan, kind: str) -> None:
    stages = [dict(stage.vram if kind == "VRAM" else stage.ram) for stage in plan.stages]
    most: dict[str, int] = {}
    for causes in stages:
        for cause, nbytes in causes.items():
            most[cause] = max(most.get(cause, 0), nbytes)
    named = [cause for cause, nbytes in sorted(most.items(), key=lambda item: -item[1])[:_NAMED] if nbytes]
    begins = [0.0] * len(stages)
    for index, cause in enumerate([*named, "other"]):
        widths = [_bytes(causes, cause, named) / GIB for causes in stages]
        axes.barh(range(len(stages)), widths, left=begins, height=0.7, color=f"C{index}", label=cause)
        begins = [begin + width for begin, width in zip(begins, widths, strict=True)]
    stay = [stage.optional / GIB for stage in plan.stages] if kind == "VRAM" else []
    if any(stay):
        rows = range(len(stages))
        axes.barh(
            rows, stay, left=begins, height=0.7, color="white", edgecolor="gray", hatch="///", label=staying(plan)
        )
        begins = [begin + width for begin, width in zip(begins, stay, strict=True)]
    for row, end in enumerate(begins):
        axes.text(end, row, f" {end:.2f}", va="center", fontsize=8)
    room = (plan.machine.vram if kind == "VRAM" else plan.machine.ram) / GIB
    if room < 3 * max(begins, default=0.0):
        axes.axvline(room, color="black", linestyle="--", linewidth=1, label=f"there are {room:.2f}")
    axes.set_yticks(range(len(stages)), [stage.name for stage in plan.stages])
    axes.invert_yaxis()
    axes.set(xlabel=f"{kind}, GiB")
    axes.margins(x=0.12)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _bytes(causes: dict[str, int], cause: str, named: list[str]) -> int:
    if cause == "other":
        return sum(nbytes for key, nbytes in causes.items() if key not in named)
    return causes.get(cause, 0)
