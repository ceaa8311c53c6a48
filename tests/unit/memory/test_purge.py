"""A purge says what it changed, frees what it says, and is the only way in the tree to empty a cache."""

import re
from pathlib import Path

import pytest
import torch
from block_files import MemoryFile

from wanfit.errors import InputError
from wanfit.memory.release import SCOPES, purge, take_snapshot
from wanfit.offload import BlockStore
from wanfit.quant import StoredWeight

ROOT = Path(__file__).resolve().parents[3]
CPU = torch.device("cpu")
MIB = 2**20


def test_one_place_in_the_tree_empties_caches():
    calls = re.compile(r"\b(torch\.cuda\.empty_cache|empty_host_cache|_host_emptyCache|malloc_trim)\b")
    places = {
        str(path.relative_to(ROOT))
        for folder in ("src", "nodes")
        for path in (ROOT / folder).rglob("*.py")
        if calls.search(path.read_text(encoding="utf-8")) and path.name != "release.py"
    }
    assert places == {"src/wanfit/memory/purge.py"}


@pytest.fixture
def store():
    """Four blocks of 64 MiB, two kept in RAM, through two slots. What other tests left in the heap is gone before."""
    purge(CPU, ["host cache"])
    blocks = {
        i: {"a.weight": StoredWeight("f32", (1024, 16384), torch.full((1024, 16384), float(i)))} for i in range(4)
    }
    store = BlockStore([MemoryFile(blocks)], CPU, policy="stream", ram_budget=4 * 64 * MIB)
    for _ in range(2):
        for index in range(4):
            with store.source().onload(index):
                pass
    yield store
    store.close()


def test_the_counters_move_by_what_is_said(store):
    report = store.report
    held = report.host_bytes + report.device_bytes
    assert report.host_bytes >= 2 * 64 * MIB and report.device_bytes == 2 * 64 * MIB
    said = purge(CPU, ["host blocks", "host cache"], {"low expert": store})
    assert store.report.host_bytes == 0 and store.report.device_bytes == 0
    freed = said.before.rss - said.after.rss
    # On the CPU device buffers are RAM too. More can go: "host cache" trims the heap of the whole process.
    assert freed > 0.9 * held, f"{freed / MIB:.0f} of {held / MIB:.0f} MiB"
    text = "\n".join(said.lines())
    assert "low expert gave up" in text and "rss" in text and "before" in text
    assert said.stayed == ()


def test_only_the_scopes_asked_for(store):
    host = store.report.host_bytes
    said = purge(CPU, ["device blocks"], {"high expert": store})
    assert store.report.device_bytes == 0 and store.report.host_bytes == host
    assert len(said.done) == 1 and any("host memory: blocks of high expert" in line for line in said.stayed)
    with store.source().onload(0) as weights:
        assert float(weights["a.weight"].data[0, 0]) == 0.0, "what was purged comes back when it is needed"
    nobody = purge(CPU, ["host blocks"])
    assert store.report.host_bytes == host and "no model holds blocks" in nobody.done[0]


def test_what_a_machine_has_no_counter_for_is_left_out():
    snapshot = take_snapshot(CPU)
    assert snapshot.rss > 0 and snapshot.allocated is None
    assert "allocated" not in "\n".join(purge(CPU, list(SCOPES)).lines())


@pytest.mark.parametrize("scopes", [["everything"], [], ["device cache", "x"]])
def test_an_unknown_scope_is_refused(scopes):
    with pytest.raises(InputError) as caught:
        purge(CPU, scopes)
    assert caught.value.code == "number_invalid"
