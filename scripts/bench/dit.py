"""One forward of the 14B transformer with random weights: time, peak memory and error, beside diffusers.

    python scripts/dev.py bench dit --layouts fp8_scaled --sizes 480p 720p --policies stream resident
    python scripts/dev.py bench dit --peers resident group fp8_group
    python scripts/dev.py bench dit --comfy COMFYUI_TREE --free-gib 12      ComfyUI's own model, and ours in ComfyUI
    python scripts/dev.py bench dit --free-gib 8 --experts 2 --steps 4 --sizes 720p    a second process holds the rest
    python scripts/dev.py bench dit --accuracy

Prints a table and writes JSON to docs/measurements/.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

import torch
from dit_accuracy import accuracy
from dit_comfy import Watch
from dit_comfy_file import write_gguf, write_safetensors
from dit_peers import PEERS
from dit_weights import DIM, LAYOUTS, SIZES, DiskFile, RepeatedFile, build, inputs, stored_block
from safetensors.torch import load_file

from wanfit.blocks import ATTENTION, ForwardSettings, choose_attention
from wanfit.blocks.elementwise import PLAIN
from wanfit.offload import BlockStore, Ladder
from wanfit.offload.lane import Slot

GIB = 2**30
BUS, CLOCK = 55.0, 1.98e9
"""GB/s and Hz of the machine that --throttle slows down (one H200)."""
MEASUREMENTS = Path(__file__).resolve().parents[2] / "docs" / "measurements"
HOLD = """
import sys, torch
keep = []
free = torch.cuda.mem_get_info()[0] - int(float(sys.argv[1]) * 2**30)
while free > 0:
    size = min(free, 2**30)
    keep.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    free -= size
print("held", flush=True)
sys.stdin.read()
"""


def measure(forward: Callable[[], object], options: argparse.Namespace) -> dict[str, float]:
    """Best and worst time of `repeat` forwards after one for warming up, or that one; memory of what counts.

    `used`: of the device, by whatever allocator, in all of them, beyond what the bare CUDA context takes.
    """
    repeat = options.repeat
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    options.watch.restart()
    begin = time.perf_counter()
    forward()
    torch.cuda.synchronize()
    first = time.perf_counter() - begin
    if repeat:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    times = [] if repeat else [first]
    for _ in range(repeat):
        begin = time.perf_counter()
        forward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {
        "seconds": min(times),
        "worst": max(times),
        "first": first,
        "allocated": torch.cuda.max_memory_allocated() / GIB,
        "reserved": torch.cuda.max_memory_reserved() / GIB,
        "used": options.watch.peak / GIB,
    }


def resident_set() -> dict[str, float]:
    """GiB of this process in RAM: its own memory (pinned too), and pages of mapped files. Linux."""
    status = Path("/proc/self/status")
    lines = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
    return {
        key: int(lines[name].split()[0]) / 2**20
        for key, name in (("rss_anon", "RssAnon"), ("rss_file", "RssFile"))
        if name in lines
    }


def throttle(store: BlockStore, gigabytes: float) -> None:
    """Make each copy last as long as over a bus of so many GB/s, by idling on the copy stream within its events."""
    lane = store._lane
    upload = lane.upload

    def slow(slot: Slot, source: torch.Tensor) -> torch.cuda.Event:
        end = upload(slot, source)
        missing = source.numel() / 1e9 * (1 / gigabytes - 1 / BUS)
        with torch.cuda.stream(lane._stream):
            torch.cuda._sleep(int(missing * CLOCK))
            end.record(lane._stream)
        return end

    lane.upload = slow


@contextlib.contextmanager
def only_free(gib: float | None) -> Iterator[None]:
    """A second process holds all device memory but `gib` GiB."""
    if gib is None:
        yield
        return
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(gib)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        holder.stdout.readline()
        yield
    finally:
        holder.stdin.close()
        holder.wait()


def ours(options: argparse.Namespace, device: torch.device) -> Iterator[dict]:
    settings = ForwardSettings(
        chunk_tokens=options.chunk,
        attention=options.backend,
        float8_matmul=None if options.float8 else False,
        packed_attention=options.packed,
        elementwise=PLAIN if options.plain else None,
    )
    for layout in options.layouts:
        block = stored_block(layout, device)
        for policy in options.policies:
            files = open_files(options, block, layout)
            with BlockStore(
                files,
                device,
                policy=policy,
                vram_budget=int(options.vram_gib * GIB) if options.vram_gib else None,
                ram_budget=int(options.ram_gib * GIB),
            ) as store:
                if options.throttle:
                    throttle(store, options.throttle)
                ladder = Ladder(settings, store)
                models = [build(store.source(i), ladder, options.blocks, device) for i in range(options.experts)]
                for size in options.sizes:
                    yield {"engine": "wanfit", "layout": layout, "policy": policy, "size": size} | run_sizes(
                        options, store, models, files, inputs(size, options.frames, device, torch.bfloat16)
                    )
                del models
            torch.cuda.empty_cache()


def open_files(options: argparse.Namespace, block: dict, layout: str) -> list:
    if options.disk is None:
        return [RepeatedFile(block, options.blocks) for _ in range(options.experts)]
    return [DiskFile(block, options.blocks, options.disk / f"{layout}.bin") for _ in range(options.experts)]


def run_sizes(options: argparse.Namespace, store: BlockStore, models: list, files: list, given: dict) -> dict:
    def forward_of(model):  # noqa: ANN001, ANN202
        return lambda: model(**given, return_dict=False)[0]

    ladder = models[0].ladder
    if options.steps:
        row = steps(options, [forward_of(model) for model in models], files)
    else:
        row = measure(forward_of(models[0]), options)
    report = store.report
    if options.profile:
        profile(forward_of(models[0]))
    speed = report.speed
    return row | {
        "resident": report.resident,
        "slots_gib": report.device_bytes / GIB,
        "host_gib": report.host_bytes / GIB,
        "pinned_gib": report.pinned_bytes / GIB,
        "copy_gb_s": speed.bandwidth / 1e9 if speed else None,
        "block_ms": speed.block_seconds * 1e3 if speed else None,
        "rungs": ladder.steps,
        "notices": list(report.notices),
        "kernels": elementwise_name(ladder.settings),
        **resident_set(),
    }


def elementwise_name(settings: ForwardSettings) -> str:
    from wanfit.blocks.elementwise import elementwise_for

    return (settings.elementwise or elementwise_for(torch.device("cuda", 0), torch.bfloat16)).name


def steps(options: argparse.Namespace, forwards: list, files: list) -> dict:
    """Runs over several experts, each an equal share of the steps; a second round shows the switch back.

    The experts share one file, so with --cold it is dropped from the system's cache before each expert's turn.
    """
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    options.watch.restart()
    times, held = [], []
    for _ in range(options.rounds):
        for forward, file in zip(forwards, files, strict=True):
            if options.cold:
                file.forget_pages()
            for _ in range(options.steps // len(forwards)):
                begin = time.perf_counter()
                forward()
                torch.cuda.synchronize()
                times.append(round(time.perf_counter() - begin, 3))
                held.append(round(torch.cuda.memory_allocated() / GIB, 3))
    return {
        "seconds": min(times),
        "worst": max(times[1:]),
        "first": times[0],
        "times": times,
        "held": held,
        "allocated": torch.cuda.max_memory_allocated() / GIB,
        "reserved": torch.cuda.max_memory_reserved() / GIB,
        "used": options.watch.peak / GIB,
    }


def profile(forward: Callable[[], object]) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CUDA]) as result:
        forward()
        torch.cuda.synchronize()
    print(result.key_averages().table(sort_by="cuda_time_total", row_limit=22, max_name_column_width=70))


def peers(options: argparse.Namespace, device: torch.device) -> Iterator[dict]:
    for name in options.peers:
        model = PEERS[name](options.blocks, device)
        for size in options.peer_sizes or options.sizes:
            given = inputs(size, options.frames, device, torch.bfloat16)
            row = measure(partial(model, **given, return_dict=False), options)
            yield {"engine": f"diffusers {name}", "layout": "bf16", "policy": name, "size": size} | row
        del model
        torch.cuda.empty_cache()


def comfy(options: argparse.Namespace, device: torch.device) -> Iterator[dict]:
    """MODELs in ComfyUI: its own, ComfyUI-GGUF's, and ours. A process for each, since ComfyUI takes it over."""
    if options.comfy is None:
        return
    folder = options.disk or Path(tempfile.gettempdir()) / "wanfit-dit"
    folder.mkdir(parents=True, exist_ok=True)
    peers = [("fp8_scaled", "safetensors", write_safetensors, ("ComfyUI", []))]
    if options.gguf_nodes:
        peers.append(("q4_k", "gguf", write_gguf, ("ComfyUI-GGUF", ["--gguf-nodes", options.gguf_nodes])))
    for layout, suffix, write, peer in peers:
        file = folder / f"comfy-{options.blocks}.{suffix}"
        if not file.exists():
            write(file, options.blocks, device)
        torch.cuda.empty_cache()
        for size in options.peer_sizes or options.sizes:
            rows = [in_comfy(options, file, size, *way) for way in (peer, ("WanFit in ComfyUI", ["--wanfit"]))]
            for row in rows:
                yield row | {"layout": layout, "size": size}


def in_comfy(options: argparse.Namespace, file: Path, size: str, engine: str, arguments: list) -> dict:
    """One row; `error` of ours: its latents against those of the other."""
    width, height = SIZES[size]
    out = {name: file.with_name(f"{name}.safetensors") for name in ("peer", "wanfit")}
    name = "wanfit" if "--wanfit" in arguments else "peer"
    out[name].unlink(missing_ok=True)
    command = [sys.executable, Path(__file__).with_name("dit_comfy.py"), "--comfy", options.comfy, "--file", file]
    command += ["--frames", options.frames, "--width", width, "--height", height, "--latents", out[name], *arguments]
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True)
    answer = done.stdout.strip().rpartition("\n")[2]
    row = json.loads(answer) if answer.startswith("{") else {"failure": f"exit code {done.returncode}"}
    if name == "wanfit" and all(path.exists() for path in out.values()):
        peer, own = (load_file(path)["latents"] for path in out.values())
        row["error"] = float((own - peer).norm() / peer.norm())
    return {"engine": engine} | row


def table(rows: list[dict]) -> str:
    head = ("engine", "layout", "policy", "size", "seconds", "worst", "first", "allocated", "reserved", "resident",
            "copy_gb_s", "block_ms", "error", "used", "rss_anon", "rss_file", "dynamic_vram", "times", "held",
            "rungs", "notices", "failure")  # fmt: skip

    def text(value: object) -> str:
        if isinstance(value, list):
            return " ".join(str(v) for v in value)
        return "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    cells = [[text(row.get(name)) for name in head] for row in rows]
    shown = [i for i in range(len(head)) if any(line[i] for line in cells)]
    return "\n".join(" | ".join(line[i] for i in shown) for line in [list(head), *cells])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=["fp8_scaled"])
    parser.add_argument("--sizes", nargs="*", choices=SIZES, default=["480p"])
    parser.add_argument("--policies", nargs="*", choices=["stream", "resident", "auto"], default=["stream"])
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--comfy", type=Path, help="a ComfyUI source tree: its own model as a peer")
    parser.add_argument("--gguf-nodes", type=Path, help="with --comfy: a tree of ComfyUI-GGUF, as a peer for GGUF")
    parser.add_argument("--peer-sizes", nargs="*", choices=SIZES, help="default: --sizes")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--attention", choices=ATTENTION, default="auto")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens")
    parser.add_argument("--ram-gib", type=float, default=32, help="host memory for blocks")
    parser.add_argument("--vram-gib", type=float, help="device memory for blocks")
    parser.add_argument("--disk", type=Path, help="folder for a real file that the blocks of all experts are read from")
    parser.add_argument("--cold", action="store_true", help="with --disk --steps: the files are not in RAM")
    parser.add_argument("--throttle", type=float, help="GB/s of the bus")
    parser.add_argument("--free-gib", type=float, help="device memory that a second process leaves free")
    parser.add_argument("--experts", type=int, default=1)
    parser.add_argument("--steps", type=int, default=0, help="instead of --repeat: a run over all experts")
    parser.add_argument("--rounds", type=int, default=1, help="of --steps")
    parser.add_argument("--plain", action="store_true", help="no fused kernels")
    parser.add_argument("--no-float8", dest="float8", action="store_false", help="no float8 products")
    parser.add_argument("--packed", action="store_true", help="q, k and v in 8 bits")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--accuracy", action="store_true", help="errors instead of times")
    parser.add_argument("--out", type=Path, help="JSON; default: docs/measurements/dit-<time>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    device = torch.device("cuda", 0)
    rows: list[dict] = []
    with torch.inference_mode(), only_free(options.free_gib):
        options.watch = Watch()
        options.watch.start()
        choice = choose_attention(options.attention, device, torch.bfloat16, 128, 16384)
        options.backend = choice.backend
        print(f"attention {choice}", flush=True)
        for part in (accuracy,) if options.accuracy else (ours, peers, comfy):
            for row in part(options, device):
                rows.append(row)
                print(table(rows[-1:]).splitlines()[-1], flush=True)
        options.watch.end()
    print(table(rows))
    now = datetime.now(timezone.utc)
    out = options.out or MEASUREMENTS / f"dit-{now:%Y%m%d-%H%M%S}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "when": now.isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "frames": options.frames,
        "dim": DIM,
        "attention": choice.name,
        "attention_seconds": choice.seconds,
        "attention_measured": [
            {key: value for key, value in dataclasses.asdict(tried).items() if value not in ("", math.inf)}
            for tried in choice.measured
        ],
        "rows": rows,
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"written to {out}")


if __name__ == "__main__":
    main()
