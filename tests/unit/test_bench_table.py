"""The README's tables are what the measurements say."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "bench" / "table.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_readme_holds_the_tables_of_the_stored_measurements(bench: ModuleType):
    text = bench.README.read_text(encoding="utf-8")
    made = bench.all_tables()
    assert made.count("\n") > 14
    assert bench.replaced(text, made) == text, "run: python scripts/dev.py bench table"


def test_memory_that_the_benchmark_held_does_not_count_and_failures_are_named(bench: ModuleType):
    rows = [{"engine": "wanfit", "layout": "fp8_scaled", "size": "480p", "seconds": 2.0, "allocated": 4.0}]
    failed = [
        {"engine": "ComfyUI", "layout": "fp8_scaled", "size": "720p", "seconds": None, "failure": "out of memory: C"}
    ]
    made = bench.table({"stream": {"rows": rows, "held_by_benchmark_gib": 1.5}, "comfy_12gib_720p": {"rows": failed}})
    assert "2.00 s, 2.5 GiB" in made
    assert "out of memory |" in made and ": C" not in made


def test_a_readme_without_markers_is_refused(bench: ModuleType):
    with pytest.raises(SystemExit, match="markers"):
        bench.replaced("# WanFit\n", "")
