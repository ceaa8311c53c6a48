"""The report of a run, whether it is finished or was broken off."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import WanFitError
from ..memory.chart import draw
from ..memory.record import MemoryRecord
from .outputs import whole_file


@dataclass(frozen=True)
class RunReport:
    """What a run was, and what its record has seen.

    Args:
        facts: for the JSON file, beside the record.
        title: of the chart. json_path, chart_path: None for nowhere.
        tell: told the table of the stages and what it does not show.
    """

    facts: Mapping[str, Any]
    record: MemoryRecord
    title: str
    json_path: Path | None
    chart_path: Path | None
    tell: Callable[[str], None]

    def write(self, more: Mapping[str, Any]) -> dict[str, Any]:
        """Tell and write it, with `more` that is known at the end. Returns: the JSON object.

        Raises:
            OSError: a file cannot be written.
        """
        report = {**self.facts, **more, "memory": self.record.to_json()}
        self.tell(self.record.table())
        for line in self.record.notes():
            self.tell(line)
        if self.json_path is not None:
            with whole_file(self.json_path) as path:
                path.write_text(json.dumps(report, indent=2, ensure_ascii=False), encoding="utf-8")
        if self.chart_path is not None:
            with whole_file(self.chart_path) as path:
                draw(self.record, path, self.title)
        return report

    @contextmanager
    def of_a_failure(self) -> Generator[None]:
        """Where an error passes, the report says how far the run came and what it had taken by then."""
        try:
            yield
        except WanFitError as error:
            self.record.end()
            try:
                self.write({"failure": {"code": error.code, "stage": error.stage, "text": str(error)}})
            except OSError as unwritable:
                self.tell(f"note: the report of the failed run cannot be written: {unwritable}")
            raise
