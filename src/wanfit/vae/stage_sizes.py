"""Heights and widths along the stages of a window: what memory and arithmetic are counted from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .windows import AxisTile, AxisWindow, Interval


@dataclass(frozen=True)
class StageSizes:
    """Height and width of a stage's input window, of what is resampled of it, and of its output."""

    window: tuple[int, int]
    resampled: tuple[int, int]
    output: tuple[int, int]

    @staticmethod
    def of(row: AxisWindow, column: AxisWindow) -> StageSizes:
        return StageSizes(
            (_length(row.window), _length(column.window)),
            (_length(row.resampled), _length(column.resampled)),
            (_length(row.output), _length(column.output)),
        )


Pick = Callable[[Iterator[int]], int]


def axis_sizes(tiles: Sequence[AxisTile], pick: Pick) -> list[tuple[int, int, int]]:
    """Per stage, `pick` (max or sum) of the tiles' sizes: of the window, of what is resampled, of the output."""
    parts = ("window", "resampled", "output")
    return [
        tuple(pick(b - a for a, b in (getattr(tile.stages[index], part) for tile in tiles)) for part in parts)
        for index in range(len(tiles[0].stages))
    ]  # pyright: ignore[reportReturnType]


def paired(rows: Sequence[tuple[int, int, int]], columns: Sequence[tuple[int, int, int]]) -> list[StageSizes]:
    """Of `axis_sizes` of both axes."""
    return [StageSizes(*zip(row, column, strict=True)) for row, column in zip(rows, columns, strict=True)]


def combined_sizes(rows: Sequence[AxisTile], columns: Sequence[AxisTile], pick: Pick) -> list[StageSizes]:
    return paired(axis_sizes(rows, pick), axis_sizes(columns, pick))


def _length(interval: Interval) -> int:
    return interval[1] - interval[0]
