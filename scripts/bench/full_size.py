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
import math
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch
from PIL import Image

from wanfit.checkpoint.structure import transformer_tensors, umt5_tensors
from wanfit.tiny.gguf_layout import FILE_TYPES, tensor_types
from wanfit.tiny.kquants import quantize
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.models import tiny_vae
from wanfit.tiny.spiece import train_tokenizer

A14B = {"dim": 5120, "ffn_dim": 13824, "num_layers": 40, "in_channels": 36, "out_channels": 16}
VOCABULARY = 384
FP8_RANGE = 64.0
HOLD = """
import sys, torch
free, total = torch.cuda.mem_get_info()
keep = torch.empty(max(0, free - int(float(sys.argv[1]) * 2**30)), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


def shapes_of_transformer() -> dict[str, tuple[int, ...]]:
    return transformer_tensors(**A14B, text_dim=4096, freq_dim=256)


class Values:
    """Random values by shape and kind; the same bytes serve every tensor of one shape."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._kept: dict[object, bytes] = {}

    def half(self, name: str, shape: tuple[int, ...]) -> bytes:
        key = ("f16", shape, name.rpartition(".")[2] if len(shape) == 1 else "", "norm" in name)
        if key not in self._kept:
            values = self._random.standard_normal(shape, dtype=np.float32)
            if "norm" in name:
                values = 1 + 0.1 * values
            elif len(shape) == 1 or "modulation" in name:
                values *= 0.02
            elif name != "shared.weight":
                values /= math.sqrt(math.prod(shape[1:]))
            self._kept[key] = values.astype(np.float16).tobytes()
        return self._kept[key]

    def float8(self, shape: tuple[int, ...]) -> bytes:
        key = ("f8", shape)
        if key not in self._kept:
            values = torch.randn(shape) * FP8_RANGE
            self._kept[key] = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy().tobytes()
        return self._kept[key]

    def quantised(self, shape: tuple[int, ...], kind: str) -> np.ndarray:
        """A few hundred random rows, repeated."""
        key = (kind, shape)
        if key not in self._kept:
            rows = self._random.standard_normal((256, shape[1]), dtype=np.float32) / math.sqrt(shape[1])
            packed = quantize(rows, kind)
            self._kept[key] = np.tile(packed, (-(-shape[0] // 256), 1))[: shape[0]]
        return self._kept[key]


def write_scaled_fp8(
    path: Path, shapes: Mapping[str, tuple[int, ...]], linears: set[str], extra: Mapping[str, bytes]
) -> None:
    """Comfy-Org's scaled fp8 layout, written as a stream."""
    values = Values()
    header: dict[str, object] = {}
    chunks: list[bytes] = []
    position = 0

    def add(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> None:
        nonlocal position
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + len(data)]}
        chunks.append(data)
        position += len(data)

    for name, shape in shapes.items():
        if name in linears:
            add(name, "F8_E4M3", shape, values.float8(shape))
            scale = 1 / (FP8_RANGE * math.sqrt(shape[1]))
            add(name.removesuffix("weight") + "scale_weight", "F32", (), struct.pack("<f", scale))
        else:
            add(name, "F16", shape, values.half(name, shape))
    add("scaled_fp8", "F8_E4M3", (0,), b"")
    for name, data in extra.items():
        add(name, "U8", (len(data),), data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for chunk in chunks:
            file.write(chunk)


def write_gguf(path: Path, shapes: Mapping[str, tuple[int, ...]], file_type: str) -> None:
    values = Values()
    writer = gguf.GGUFWriter(path, "wan")
    writer.add_quantization_version(2)
    writer.add_file_type(FILE_TYPES[file_type][0])
    types = tensor_types(dict(shapes), file_type)
    for name, shape in shapes.items():
        kind = types[name]
        if kind in ("F16", "F32"):
            array = np.frombuffer(values.half(name, shape), np.float16).reshape(shape)
            writer.add_tensor(name, array.astype(np.float32) if kind == "F32" else array)
        else:
            packed = values.quantised(shape, kind)
            writer.add_tensor(name, packed, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_models(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    shapes = shapes_of_transformer()
    linears = {name for name, shape in shapes.items() if len(shape) == 2}
    write_scaled_fp8(folder / "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors", shapes, linears, {})
    write_gguf(folder / "Wan2.2-I2V-A14B-LowNoise-Q4_K_M.gguf", shapes, "Q4_K_M")
    text = umt5_tensors(
        vocab=VOCABULARY, dim=4096, inner_dim=4096, ffn_dim=10240, num_heads=64, num_layers=24, buckets=32
    )
    linears = {name for name, shape in text.items() if len(shape) == 2 and "block" in name and "bias" not in name}
    tokenizer = {"spiece_model": train_tokenizer(VOCABULARY - 12)}
    write_scaled_fp8(folder / "umt5_xxl_fp8_e4m3fn_scaled.safetensors", text, linears, tokenizer)
    write_plain(folder / "wan_2.1_vae.safetensors", tiny_vae(base_dim=96))
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
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(card)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        holder.stdout.readline()
        start = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True)
        seconds = time.perf_counter() - start
    finally:
        holder.stdin.close()
        holder.wait()
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
