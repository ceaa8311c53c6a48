"""Tiers, `--tier`, `--require`; and the repository root kept off sys.path (our `nodes/` would shadow ComfyUI's)."""

from __future__ import annotations

import gc
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
TIERS = ("unit", "nodes", "comfyui", "cuda", "multi_gpu", "browser")

sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
sys.path.insert(0, str(ROOT / "tests" / "support"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="run the tests of this tier only")
    parser.addoption("--require", choices=TIERS, action="append", default=[], help="a skip in this tier fails")


def tier_of(item: pytest.Item) -> str:
    """The tier of a test: its marker, else the folder below tests/."""
    for tier in TIERS:
        if item.get_closest_marker(tier):
            return tier
    folder = item.path.relative_to(ROOT / "tests").parts[0]
    return folder if folder in TIERS else "unit"


def group_of(nodeid: str) -> str:
    """What has to run in one process: a ComfyUI server's tests, for one start of it; else a file, for its fixtures."""
    file, _, name = nodeid.partition("::")
    tree = re.search(r"\[(\d+\.\d+\.\d+)", name) if "/comfyui/" in file else None
    return f"ComfyUI {tree[1]}" if tree else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadgroup`. pytest-xdist 3.8's own writes groups into node ids, which pytest 9.2 does not let it do."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByGroup(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByGroup(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = config.getoption("--tier")
    if wanted:
        other = [item for item in items if tier_of(item) != wanted]
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if tier_of(item) == wanted]


def pytest_collection_finish() -> None:
    """A full collection over all imported modules takes half a second, and runs collect several times each."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    outcome = yield
    report = outcome.get_result()
    if report.skipped and not hasattr(report, "wasxfail") and tier_of(item) in item.config.getoption("--require"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"--require {tier_of(item)}: skipped, but required. {reason}"
