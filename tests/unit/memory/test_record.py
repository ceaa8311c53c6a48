"""The record catches a peak inside a stage and gives it to that stage."""

import json
import time

import torch
from PIL import Image

from wanfit.memory.chart import draw
from wanfit.memory.record import MemoryRecord

MIB = 2**20


def test_a_peak_belongs_to_its_stage(tmp_path):
    with MemoryRecord(torch.device("cpu"), interval_s=0.002) as record:
        record.begin("quiet")
        time.sleep(0.05)
        record.begin("large")
        block = torch.ones(200 * MIB, dtype=torch.uint8)
        time.sleep(0.05)
        del block
        record.begin("after")
        time.sleep(0.05)
    quiet, large, after = record.stages
    assert [stage.name for stage in record.stages] == ["quiet", "large", "after"]
    assert large.rss_peak - large.rss_before > 180 * MIB
    assert quiet.rss_peak - quiet.rss_before < 100 * MIB
    assert after.rss_peak < large.rss_peak
    assert large.allocated_peak is None, "no CUDA counters on a CPU run"
    json.dumps(record.to_json())
    assert "large" in record.table() and "RAM peak" in record.table()
    draw(record, tmp_path / "memory.png", "test")
    assert Image.open(tmp_path / "memory.png").size[0] > 600


def test_a_stage_that_fails_is_recorded_and_the_thread_ends():
    record = MemoryRecord(torch.device("cpu"))
    try:
        with record:
            record.begin("fails")
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert [stage.name for stage in record.stages] == ["fails"]
    assert not record._thread.is_alive()


def test_a_chart_can_be_drawn_while_sampling_goes_on(tmp_path):
    """The probe node draws in the middle of a run: the trace must not grow between two reads of it."""
    with MemoryRecord(torch.device("cpu"), interval_s=1e-5) as record:
        record.begin("busy")
        for index in range(3):
            draw(record, tmp_path / f"{index}.png", "test")
    assert len(record.samples()) > 100, "the thread did sample meanwhile"
