"""Model files for tests: full-size headers without weights, and independent decoders."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import torch

SIZES = {
    "t2v-a14b": {"dim": 5120, "ffn_dim": 13824, "num_layers": 40, "in_channels": 16, "out_channels": 16},
    "i2v-a14b": {"dim": 5120, "ffn_dim": 13824, "num_layers": 40, "in_channels": 36, "out_channels": 16},
    "ti2v-5b": {"dim": 3072, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48},
    "t2v-1.3b": {"dim": 1536, "ffn_dim": 8960, "num_layers": 30, "in_channels": 16, "out_channels": 16},
    "i2v-14b": {
        "dim": 5120,
        "ffn_dim": 13824,
        "num_layers": 40,
        "in_channels": 36,
        "out_channels": 16,
        "image_dim": 1280,
    },
    "flf2v-14b": {
        "dim": 5120,
        "ffn_dim": 13824,
        "num_layers": 40,
        "in_channels": 36,
        "out_channels": 16,
        "image_dim": 1280,
        "image_positions": 514,
    },
}
"""Arguments of `transformer_tensors` for the real models, without text_dim and freq_dim."""

_BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "U8": 1, "I8": 1}


def header_of(tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str] | None = None) -> dict:
    """A safetensors header for name -> (dtype, shape), in the order that the library writes."""
    header: dict = {"__metadata__": metadata} if metadata else {}
    offset = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=lambda item: (-_BYTES[item[1][0]], item[0])):
        end = offset + math.prod(shape) * _BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    return header


def write_header(path: Path, header: dict, data_bytes: int | None = None) -> Path:
    """The header and, as a hole in the file, the data that it describes (or `data_bytes`)."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if data_bytes is None:
        data_bytes = max((e["data_offsets"][1] for n, e in header.items() if n != "__metadata__"), default=0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + data_bytes)
    return path


def decode_float8(data: torch.Tensor) -> torch.Tensor:
    """float8 by the definition of its bits, in double precision."""
    exponent_bits, bias = (4, 7) if data.dtype == torch.float8_e4m3fn else (5, 15)
    mantissa_bits = 7 - exponent_bits
    raw = data.view(torch.uint8).numpy().astype(np.int64)
    exponent, mantissa = raw >> mantissa_bits & (1 << exponent_bits) - 1, raw & (1 << mantissa_bits) - 1
    fraction = mantissa / (1 << mantissa_bits)
    value = np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))
    return torch.from_numpy(np.where(raw >> 7, -value, value))
