"""A picture of a memory record: the trace with its stages, and the peak of each stage."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from matplotlib import font_manager
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from .record import MemoryRecord

GIB = 2**30
_CHINESE_FONTS = (
    "Microsoft YaHei", "SimHei", "PingFang SC", "PingFang HK", "Heiti TC", "Noto Sans CJK SC", "Noto Sans CJK JP",
    "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei",
)  # fmt: skip


@cache
def _as_it_is() -> dict[str, Any]:
    """For a person's words: a $ begins no formula, and Chinese is drawn where a font for it is installed."""
    known = set(font_manager.get_font_names())
    return {"parse_math": False, "fontfamily": ["DejaVu Sans", *(name for name in _CHINESE_FONTS if name in known)]}


def draw(record: MemoryRecord, path: Path, title: str) -> None:
    """Write the chart of `record` as a PNG to `path`."""
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    trace, peaks = figure.subplots(2, 1, height_ratios=(3, 2))
    figure.suptitle(title, **_as_it_is())
    _draw_trace(trace, record)
    _draw_peaks(peaks, record)
    figure.savefig(path, dpi=110, format="png")


def _draw_trace(axes: Any, record: MemoryRecord) -> None:
    samples = record.samples()
    times = [sample.at_s for sample in samples]
    axes.plot(times, [sample.rss / GIB for sample in samples], color="C0", label="RAM (resident)")
    files = [sample.rss_files for sample in samples]
    if all(value is not None for value in files):
        axes.plot(
            times,
            [(value or 0) / GIB for value in files],
            color="C0",
            linestyle=":",
            label="of it mapped files (weights read in place)",
        )
    vram = [sample.vram for sample in samples]
    if all(value is not None for value in vram) and vram:
        axes.plot(times, [(value or 0) / GIB for value in vram], color="C1", label="VRAM (reserved)")
    for index, stage in enumerate(record.stages):
        axes.axvspan(stage.start_s, stage.start_s + stage.seconds, color=f"C{index + 2}", alpha=0.12, linewidth=0)
        axes.text(
            stage.start_s + stage.seconds / 2,
            0.98,
            stage.name,
            transform=axes.get_xaxis_transform(),
            rotation=90,
            va="top",
            ha="center",
            fontsize=8,
            **_as_it_is(),
        )
    axes.set(xlabel="seconds", ylabel="GiB", ylim=(0, 1.45 * axes.get_ylim()[1]), xlim=(0, None))
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=8, frameon=False)
    axes.grid(alpha=0.3)


def _draw_peaks(axes: Any, record: MemoryRecord) -> None:
    """Measured, and beside it in a lighter colour what the plan said: RAM below the line, device memory above."""
    rows = range(len(record.stages))
    ram = axes.barh(rows, [stage.rss_peak / GIB for stage in record.stages], height=0.22, align="edge", color="C0")
    axes.bar_label(ram, fmt="%.2f", fontsize=8, padding=2)
    meaning = "blue: RAM"
    if any(stage.allocated_peak is not None for stage in record.stages):
        meaning += "; orange: VRAM allocated"
        peaks = [(stage.allocated_peak or 0) / GIB for stage in record.stages]
        vram = axes.barh(rows, peaks, height=-0.22, align="edge", color="C1")
        axes.bar_label(vram, fmt="%.2f", fontsize=8, padding=2)
    _draw_planned(axes, record)
    axes.set_yticks(rows, [stage.name for stage in record.stages], **_as_it_is())
    axes.invert_yaxis()
    axes.set(xlabel=f"peak, GiB ({meaning}; light, beside it: as planned)")
    axes.margins(x=0.1)
    axes.grid(axis="x", alpha=0.3)


def _draw_planned(axes: Any, record: MemoryRecord) -> None:
    """RAM on top of what the process had before the run; device memory with a line at the least that will do."""
    before = record.stages[0].rss_before if record.stages else 0
    for row, stage in enumerate(record.stages):
        if stage.planned is None:
            continue
        ram = (before + stage.planned.ram_needed) / GIB
        axes.barh(row + 0.22, ram, height=0.16, align="edge", color="C0", alpha=0.4)
        if stage.allocated_peak is not None:
            axes.barh(row - 0.22, stage.planned.vram_peak / GIB, height=-0.16, align="edge", color="C1", alpha=0.4)
            axes.plot([stage.planned.vram_needed / GIB] * 2, [row - 0.38, row - 0.22], color="C1", linewidth=2)
