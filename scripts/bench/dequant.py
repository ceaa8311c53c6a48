"""Time and peak memory of every dequantiser on one 13824 x 5120 matrix of Wan 14B, and diffusers' in the same run.

python scripts/dev.py bench dequant [--device cuda] [--dtype bfloat16] [--repeat 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import torch
from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor
from torch.profiler import ProfilerActivity, profile

from wanfit.quant import FORMATS, StoredWeight, dequantize

ROWS, COLUMNS = 13824, 5120


def stored(key: str, rows: int, columns: int) -> StoredWeight:
    """Random bytes; scales are 1 where the format keeps them apart."""
    generator = torch.Generator().manual_seed(0)

    def random_bytes(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    shape = (rows, columns)
    if key in ("f32", "f16", "bf16"):
        return StoredWeight(
            key,
            shape,
            torch.zeros(shape, dtype=getattr(torch, {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[key])),
        )
    if key in ("f8_e4m3", "f8_e5m2", "mxfp8"):
        data = random_bytes(*shape).view(torch.float8_e5m2 if key == "f8_e5m2" else torch.float8_e4m3fn)
        return StoredWeight(
            key, shape, data, {"scale": random_bytes(rows * columns // 32) if key == "mxfp8" else torch.ones(())}
        )
    if key.startswith("int8"):
        options = {"convrot_groupsize": 256} if key == "int8_convrot" else {}
        return StoredWeight(
            "int8", shape, random_bytes(*shape).view(torch.int8), {"scale": torch.ones(rows, 1)}, options
        )
    if key == "nvfp4":
        params = {"scale": random_bytes(rows * columns // 16), "scale_2": torch.ones(())}
        return StoredWeight(key, shape, random_bytes(rows, columns // 2), params)
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[key.upper()]]
    return StoredWeight(key, shape, random_bytes(rows, columns // elements * size))


def measure(run: Callable[[], torch.Tensor], device: torch.device, repeat: int) -> tuple[float, float]:
    """Median milliseconds, and peak bytes an element with the result."""
    run()
    times: list[float] = []
    for _ in range(repeat):
        if device.type == "cuda":
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
        else:
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(times), peak_bytes(run, device)


def peak_bytes(run: Callable[[], torch.Tensor], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        elements = run().numel()
        return (torch.cuda.max_memory_allocated() - before) / elements
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
        elements = run().numel()
    living = peak = 0
    events = [event for event in recorder.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        living += event.nbytes()
        peak = max(peak, living)
    return peak / elements


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--columns", type=int, default=COLUMNS)
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args()
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    rows: list[dict[str, object]] = []
    print(f"{'format':14}{'ms':>9}{'B/elem':>8}   diffusers: {'ms':>9}{'B/elem':>8}")
    for key in [*FORMATS, "int8_convrot"]:
        weight = stored(key, options.rows, options.columns).to(device)
        ms, peak = measure(lambda weight=weight: dequantize(weight, dtype), device, options.repeat)
        row: dict[str, object] = {"format": key, "ms": ms, "peak_bytes_per_element": peak}
        text = f"{key:14}{ms:9.3f}{peak:8.2f}"
        if key[0] in "qi" and "_" in key and key != "int8_convrot":
            theirs = GGUFParameter(weight.data, quant_type=gguf.GGMLQuantizationType[key.upper()])
            ms, peak = measure(lambda theirs=theirs: dequantize_gguf_tensor(theirs).to(dtype), device, options.repeat)
            row |= {"diffusers_ms": ms, "diffusers_peak_bytes_per_element": peak}
            text += f"              {ms:9.3f}{peak:8.2f}"
        rows.append(row)
        print(text, flush=True)
    if options.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
        report = {
            "benchmark": "dequant", "device": name, "dtype": options.dtype, "shape": [options.rows, options.columns],
            "torch": torch.__version__, "diffusers": importlib.metadata.version("diffusers"), "results": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
