"""What watching costs and what a purge gives back: blocks of the 14B transformer with random weights.

    python scripts/dev.py bench probe --blocks 10 --size 832x480x81 --out FILE.json
    python scripts/dev.py bench probe --device cpu --blocks 2 --size 64x64x5

Three questions: how much longer a forward takes under a memory record and under the alarm (paired, alternating);
whether the second and third run peak higher than the first; whether a purge takes allocated memory and the resident
set back to where they were before the load.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from dit_weights import RepeatedFile, build, stored_block

from wanfit.blocks import ForwardSettings
from wanfit.memory.alarm import Alarm
from wanfit.memory.record import MemoryRecord, Stage
from wanfit.memory.release import SCOPES, Snapshot, purge, take_snapshot
from wanfit.offload import BlockStore, Ladder

MIB = 2**20


def inputs(size: str, device: torch.device) -> dict[str, torch.Tensor]:
    width, height, frames = map(int, size.split("x"))
    generator = torch.Generator(device).manual_seed(7)
    shape = (1, 16, (frames - 1) // 4 + 1, height // 8, width // 8)
    return {
        "hidden_states": torch.randn(shape, generator=generator, device=device).bfloat16(),
        "timestep": torch.tensor([700.0], device=device),
        "encoder_hidden_states": torch.randn(1, 512, 4096, generator=generator, device=device).bfloat16(),
    }


class Run:
    """One model on a device, from load to purge."""

    def __init__(self, options: argparse.Namespace, block: dict, device: torch.device, alarm: Alarm | None) -> None:
        self.device = device
        self.store = BlockStore(
            [RepeatedFile(block, options.blocks)], device, policy=options.policy, ram_budget=options.ram_mib * MIB
        )
        self.ladder = Ladder(ForwardSettings(4096), self.store, alarm=alarm)
        self.model = build(self.store.source(), self.ladder, options.blocks, device)
        self.given = inputs(options.size, device)

    def forward(self) -> float:
        begin = time.perf_counter()
        self.model(**self.given, return_dict=False)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin


def overhead(options: argparse.Namespace, block: dict, device: torch.device) -> dict[str, object]:
    """Seconds of a forward: plain, under the record, under the alarm, in turn; medians of all."""
    run = Run(options, block, device, None)
    ladder = run.ladder
    ways: dict[str, tuple[Callable[[], object], Alarm | None]] = {
        "plain": (nullcontext, None),
        "record": (lambda: _recorded(device), None),
        "alarm": (nullcontext, Alarm(device)),
        "both": (lambda: _recorded(device), Alarm(device)),
    }
    for _ in range(2):
        run.forward()
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeat):
        for name, (record, alarm) in ways.items():
            ladder._alarm = alarm
            with record():
                times[name].append(run.forward())
    run.store.close()
    plain = statistics.median(times["plain"])
    medians = {name: statistics.median(values) for name, values in times.items()}
    paired = {
        name: statistics.median(a / b for a, b in zip(values, times["plain"], strict=True)) - 1
        for name, values in times.items()
    }
    return {"seconds": medians, "over_plain": {n: v / plain - 1 for n, v in medians.items()}, "paired": paired}


def _recorded(device: torch.device) -> MemoryRecord:
    record = MemoryRecord(device)
    record.begin("forward")
    return record


def one_run(options: argparse.Namespace, block: dict, device: torch.device) -> tuple[Stage, Snapshot, Snapshot]:
    """(its stage, before the load, after the purge)."""
    before = take_snapshot(device)
    with MemoryRecord(device) as record:
        record.begin("run")
        run = Run(options, block, device, Alarm(device))
        run.forward()
        run.forward()
        store = run.store
        record.end()
    del run
    report = purge(device, list(SCOPES), {"model": store})
    store.close()
    print("\n".join(report.lines()))
    return record.stages[0], before, take_snapshot(device)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--size", default="832x480x81")
    parser.add_argument("--layout", default="fp8_scaled")
    parser.add_argument("--policy", default="stream")
    parser.add_argument("--ram-mib", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
    block = stored_block(options.layout, device)
    result: dict[str, object] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "options": {name: str(value) for name, value in vars(options).items()},
        "overhead": overhead(options, block, device),
    }
    purge(device, list(SCOPES))
    runs = []
    for _ in range(3):
        stage, before, after = one_run(options, block, device)
        row = {
            "allocated_peak": stage.allocated_peak,
            "reserved_peak": stage.reserved_peak,
            "rss_peak": stage.rss_peak,
            "allocated_beyond_before_mib": None
            if after.allocated is None or before.allocated is None
            else (after.allocated - before.allocated) / MIB,
            "rss_before": before.rss,
            "rss_after": after.rss,
            "rss_over_before": after.rss / before.rss,
            "pinned_after": after.pinned,
        }
        runs.append(row)
    result["runs"] = runs
    for name in ("allocated_peak", "reserved_peak", "rss_peak"):
        if runs[0][name]:
            result[f"second_over_first_{name}"] = runs[1][name] / runs[0][name]
    text = json.dumps(result, indent=1)
    print(text)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
