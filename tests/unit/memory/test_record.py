"""The record catches a peak inside a stage and gives it to that stage."""

import json
import time
import warnings
from types import SimpleNamespace

import torch
from matplotlib import font_manager
from PIL import Image

from wanfit.memory import counters, host, nvml
from wanfit.memory.chart import draw
from wanfit.memory.counters import beyond_the_card
from wanfit.memory.record import MemoryRecord, PlannedPeak, Stage

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


def test_a_stage_may_be_named_anything(tmp_path):
    """A label of the probe node: no formula is begun by $, and Chinese has its characters where a font is there."""
    name = "采样 costs $5 \\frac{a}$"
    with MemoryRecord(torch.device("cpu")) as record:
        record.begin(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error" if _chinese_font() else "ignore")
        draw(record, tmp_path / "a.png", f"Memory up to {name}")
    assert (tmp_path / "a.png").stat().st_size > 10_000


def _chinese_font() -> bool:
    return any(name.startswith("Noto Sans CJK") for name in font_manager.get_font_names())


def test_what_is_planned_within_a_stage_stands_beside_it(tmp_path):
    with MemoryRecord(torch.device("cpu")) as record:
        record.expect(PlannedPeak(1, 1, 1))  # no stage runs: nothing to stand beside
        record.begin("sampling")
        record.expect(PlannedPeak(0, 0, 300 * MIB))
        record.expect(PlannedPeak(0, 0, 200 * MIB))
    (stage,) = record.stages
    assert stage.planned == PlannedPeak(0, 0, 300 * MIB)
    assert "+0.29 GiB RAM" in record.table()
    draw(record, tmp_path / "memory.png", "test")


def test_what_is_read_from_disk_and_what_cannot_be_read(tmp_path):
    record = MemoryRecord(torch.device("cpu"))
    with record:
        record.begin("quiet")
    (stage,) = record.stages
    (said,) = record.notes()
    assert ("disk_read" in record.unread) == (stage.disk_read is None)
    assert said.startswith("not read: ") and "spilled (no CUDA device is used)" in said
    assert stage.disk_read is None or 0 <= stage.disk_read < 100 * MIB


def test_device_memory_that_cannot_be_on_the_card():
    """PyTorch has 11 GiB of a card on which all processes together use 7.5: 3.5 GiB or more are elsewhere."""
    assert beyond_the_card(11 * 1024 * MIB, 7680 * MIB) == 3584 * MIB
    assert beyond_the_card(7 * MIB, 8 * MIB) == 0
    record = MemoryRecord(torch.device("cpu"))
    record.stages.append(Stage("denoise high", 0.0, spilled_peak=3584 * MIB))
    assert "denoise high: at least 3.50 GiB of device memory lay in RAM" in record.notes()[0]


def test_counters_that_windows_and_wsl_lack_or_count_otherwise(monkeypatch):
    """The code paths of other systems, by what those systems answer."""
    monkeypatch.setattr(counters.sys, "platform", "win32")
    read = counters.Counters(torch.device("cpu"))
    assert read.disk_read() is None and "mapped files" in read.unread["disk_read"]

    def off() -> None:
        raise RuntimeError("PdhAddEnglishCounterW failed. Performance counters may be disabled.")

    monkeypatch.setattr(host.psutil, "swap_memory", off)
    read = counters.Counters(torch.device("cpu"))
    assert read.read().swap is None and "switched off" in read.unread["swap"]


def test_a_driver_that_lists_no_processes_says_none():
    class NVMLError(Exception):
        pass

    def refuse(_: object) -> None:
        raise NVMLError("Not Supported")

    library = SimpleNamespace(
        NVMLError=NVMLError,
        nvmlDeviceGetComputeRunningProcesses=refuse,
        nvmlDeviceGetGraphicsRunningProcesses=lambda _: [SimpleNamespace(pid=7, usedGpuMemory=None)],
        nvmlSystemGetProcessName=refuse,
    )
    assert nvml.Gpu(library, None).processes() == [nvml.GpuProcess(7, "unknown", None)]
    library.nvmlDeviceGetGraphicsRunningProcesses = refuse
    assert nvml.Gpu(library, None).processes() == []
