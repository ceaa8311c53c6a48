"""Model files at real size with random values, written as a stream: scaled fp8, GGUF, UMT5-XXL, VAE, a LoRA.

For memory, time and placement only: tensors of one shape share their bytes, and a video made with them is noise.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from wanfit.checkpoint.structure import transformer_tensors, umt5_tensors
from wanfit.tiny.gguf_layout import FILE_TYPES, tensor_types
from wanfit.tiny.kquants import quantize
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.lora import write_lora
from wanfit.tiny.models import tiny_vae
from wanfit.tiny.spiece import train_tokenizer

A14B = {"dim": 5120, "ffn_dim": 13824, "num_layers": 40, "out_channels": 16}
CHANNELS = {"i2v": 36, "t2v": 16}
TOKENS = 384
"""Of the text encoder's tokenizer; its table of embeddings can have more rows, as UMT5-XXL's 256384."""

FP8_RANGE = 64.0
_ROWS = 16384
"""Drawn of a matrix in 16 bit; after that they repeat."""


def shapes_of_transformer(kind: str) -> dict[str, tuple[int, ...]]:
    """By canonical name, of one expert; `kind` is i2v or t2v."""
    return transformer_tensors(**A14B, in_channels=CHANNELS[kind], text_dim=4096, freq_dim=256)


class Values:
    """Random values by shape and kind; the same bytes serve every tensor of one shape."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)
        self._kept: dict[object, bytes] = {}

    def half(self, name: str, shape: tuple[int, ...]) -> bytes:
        key = ("f16", shape, name.rpartition(".")[2] if len(shape) == 1 else "", "norm" in name)
        if key not in self._kept:
            drawn = (min(shape[0], _ROWS), *shape[1:])
            values = np.resize(self._random.standard_normal(drawn, dtype=np.float32), shape)
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


def write_expert(path: Path, kind: str) -> None:
    """One A14B expert: scaled fp8, or GGUF of the type that the file's name ends with."""
    shapes = shapes_of_transformer(kind)
    if path.suffix == ".gguf":
        write_gguf(path, shapes, path.stem.rpartition("-")[2])
    else:
        write_scaled_fp8(path, shapes, {name for name, shape in shapes.items() if len(shape) == 2}, {})


def write_text_encoder(path: Path, *, rows: int) -> None:
    """UMT5-XXL, scaled fp8 with its tokenizer inside; `rows` of its table of embeddings."""
    text = umt5_tensors(vocab=rows, dim=4096, inner_dim=4096, ffn_dim=10240, num_heads=64, num_layers=24, buckets=32)
    linears = {name for name, shape in text.items() if len(shape) == 2 and "block" in name and "bias" not in name}
    write_scaled_fp8(path, text, linears, {"spiece_model": train_tokenizer(TOKENS - 12)})


def write_vae(path: Path) -> None:
    """VAE 2.1."""
    write_plain(path, tiny_vae(base_dim=96))


def write_rank_64(path: Path, kind: str) -> None:
    """A LoRA of rank 64 on all linears, bf16."""
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes_of_transformer(kind).items():
        if name.startswith("blocks.") and len(shape) == 2:
            key = f"diffusion_model.{name.removesuffix('.weight')}"
            tensors[f"{key}.lora_down.weight"] = torch.randn(64, shape[1]).mul_(0.02).bfloat16()
            tensors[f"{key}.lora_up.weight"] = torch.randn(shape[0], 64).mul_(0.02).bfloat16()
    write_lora(path, tensors)
