"""What a LoRA on all linears of the 14B transformer costs in time and memory, with random weights.

    python scripts/dev.py bench lora --rank 64 --blocks 8

Prints a table and writes JSON to docs/measurements/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from datetime import datetime, timezone
from pathlib import Path

import torch
from dit import GIB, MEASUREMENTS
from dit_weights import LAYOUTS, SIZES, RepeatedFile, build, inputs, linear_shapes, stored_block

from wanfit.blocks import ATTENTION, BlockPatches, ForwardSettings, LowRank, choose_attention, projection
from wanfit.offload import BlockStore, Ladder, PatchStore

_MERGING = projection._merging_is_less


def random_lora(rank: int, blocks: int) -> dict[int, BlockPatches]:
    """bf16 in host memory, on all linears; tensors of its own in each block, as in a file."""
    patches: dict[int, BlockPatches] = {}
    for index in range(blocks):
        low_rank: dict[str, list[LowRank]] = {}
        for name, (out, columns) in linear_shapes().items():
            down = torch.randn(rank, columns, dtype=torch.bfloat16).mul_(0.02)
            up = torch.randn(out, rank, dtype=torch.bfloat16).mul_(0.02)
            low_rank[name.removesuffix(".weight")] = [LowRank(down, up, 0.5)]
        patches[index] = BlockPatches(low_rank)
    return patches


def one_pass(forward) -> tuple[float, float]:  # noqa: ANN001
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    forward()
    torch.cuda.synchronize()
    return time.perf_counter() - begin, torch.cuda.max_memory_allocated() / GIB


def bring_in(store: PatchStore, blocks: int) -> None:
    for index in range(blocks):
        with store.onload(index):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=["fp8_scaled"])
    parser.add_argument("--size", choices=SIZES, default="480p")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--attention", choices=ATTENTION, default="auto")
    parser.add_argument("--out", type=Path, help="JSON; default: docs/measurements/lora-<time>.json")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    device, dtype = torch.device("cuda", 0), torch.bfloat16
    choice = choose_attention(options.attention, device, dtype, 128, 16384)
    patches = random_lora(options.rank, options.blocks)
    file_bytes = sum(block.nbytes(torch.bfloat16) for block in patches.values())
    rows: list[dict] = []
    with torch.inference_mode():
        given = inputs(options.size, options.frames, device, dtype)
        for layout in options.layouts:
            stored = stored_block(layout, device)
            for float8 in (None, False) if layout == "fp8_scaled" else (False,):
                new = measure_layout(options, layout, stored, float8, patches, given, choice.backend)
                rows += new
                print(*new, sep="\n", flush=True)
    now = datetime.now(timezone.utc)
    out = options.out or MEASUREMENTS / f"lora-{now:%Y%m%d-%H%M%S}.json"
    record = {
        "when": now.isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "attention": choice.name,
        "size": options.size,
        "frames": options.frames,
        "blocks": options.blocks,
        "rank": options.rank,
        "lora_file_bytes": file_bytes,
        "rows": rows,
    }
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"LoRA {file_bytes / 2**20:.1f} MiB; written to {out}")


def measure_layout(options, layout, stored, float8, patches, given, backend) -> list[dict]:  # noqa: ANN001
    """The ways in turn, so that a drift of the clock falls on all of them."""
    device, dtype = given["hidden_states"].device, given["hidden_states"].dtype
    file_bytes = sum(block.nbytes(dtype) for block in patches.values())
    settings = ForwardSettings(chunk_tokens=4096, attention=backend, float8_matmul=float8)
    file = RepeatedFile(stored, options.blocks)
    with BlockStore([file], device, policy="stream", ram_budget=32 * GIB) as store:
        model = build(store.source(), Ladder(settings, store), options.blocks, device)
        streamed = PatchStore(patches, device, dtype, keep=False)
        kept = PatchStore(patches, device, dtype, keep=True)
        ways = {"none": (None, _MERGING), "streamed": (streamed, _MERGING), "kept": (kept, _MERGING)}
        if float8 is False:
            ways |= {"streamed, side path": (streamed, lambda matrix, rows: False)}
        times: dict[str, list[float]] = {way: [] for way in ways}
        peaks: dict[str, float] = {}
        held: dict[str, tuple[float, float]] = {"none": (0.0, 0.0)}
        for number in range(options.repeat + 1):
            for way, (source, rule) in ways.items():
                projection._merging_is_less = rule
                for block in model.blocks:
                    block.patches = source
                if source is not None:
                    bring_in(source, options.blocks if source is kept else 1)
                seconds, peaks[way] = one_pass(lambda: model(**given, return_dict=False))
                if number:
                    times[way].append(seconds)
                if source is not None:
                    held[way] = source.device_bytes / file_bytes, source.host_bytes / file_bytes
                    source.release_device()
        projection._merging_is_less = _MERGING
        rows = []
        for way, seconds in times.items():
            rows.append({
                "layout": layout,
                "float8": float8 is None,
                "lora": way,
                "seconds": statistics.median(seconds),
                "best": min(seconds),
                "ratio": statistics.median(seconds) / statistics.median(times["none"]),
                "best_ratio": min(seconds) / min(times["none"]),
                "peak_gib": peaks[way],
                "device_over_file": held[way][0],
                "host_over_file": held[way][1],
            })  # fmt: skip
        streamed.close()
        kept.close()
    torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    main()
