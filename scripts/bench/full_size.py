"""The whole main job at real size: `wanfit generate` on an I2V-A14B pair with random weights, on a card of N GiB.

    python scripts/dev.py bench full_size --models DIR [--card GIB ...] [--size 832x480] [--frames 81] [--steps 4]

Writes 31 GB of model files to DIR unless they are there: high expert scaled fp8, low expert GGUF Q4_K_M, UMT5-XXL
scaled fp8 (with a small vocabulary), VAE 2.1. For each `--card` a second process holds all device memory but that
many GiB, then the command line runs as a user runs it. Prints the table of each run's report; `--json FILE` keeps
them. The weights are random: the video is noise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from dit import only_free
from full_size_files import TOKENS, write_expert, write_text_encoder, write_vae
from PIL import Image


def write_models(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    write_expert(folder / "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors", "i2v")
    write_expert(folder / "Wan2.2-I2V-A14B-LowNoise-Q4_K_M.gguf", "i2v")
    write_text_encoder(folder / "umt5_xxl_fp8_e4m3fn_scaled.safetensors", rows=TOKENS)
    write_vae(folder / "wan_2.1_vae.safetensors")
    Image.effect_noise((832, 480), 60).convert("RGB").save(folder / "start.png")


def run_on_card(options: argparse.Namespace, card: float) -> dict[str, object]:
    """One `wanfit generate` with all device memory but `card` GiB held by another process."""
    width, height = options.size.split("x")
    command = [sys.executable, "-m", "wanfit", "generate", "--model", str(options.models), "--prompt", "a boat"]
    command += ["--image", str(options.models / "start.png"), "--width", width, "--height", height]
    command += ["--frames", str(options.frames), "--steps", str(options.steps), "--guidance", "1", "--sampler", "euler"]
    command += [
        "--out",
        str(options.models / "out.mp4"),
        "--report",
        str(options.models / "report.json"),
        *options.more,
    ]
    with only_free(card):
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - start
    print(f"--- card {card} GiB, {options.size}x{options.frames}, {options.steps} steps: {seconds:.0f} s")
    print(done.stdout[-2500:])
    if done.returncode:
        print(done.stderr[-2500:])
        return {"card_gib": card, "exit_code": done.returncode, "message": done.stderr[-500:]}
    report = json.loads((options.models / "report.json").read_text(encoding="utf-8"))
    return {"card_gib": card, "exit_code": 0, "seconds": seconds, **report}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--card", type=float, action="append", help="GiB that stay free; repeat for several")
    parser.add_argument("--size", default="832x480")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    options, options.more = parser.parse_known_args()
    if not (options.models / "start.png").exists():
        start = time.perf_counter()
        write_models(options.models)
        print(f"models written in {time.perf_counter() - start:.0f} s", flush=True)
    results = [run_on_card(options, card) for card in options.card or [12.0]]
    if options.json:
        options.json.write_text(json.dumps(results, indent=2), encoding="utf-8")
    return int(any(result["exit_code"] for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
