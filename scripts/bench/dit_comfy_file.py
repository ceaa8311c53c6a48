"""The file that `dit_comfy.py` gives to ComfyUI: random scaled fp8 weights, laid out as the published files are."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import torch
from dit_weights import DIM, stored_block

TEXT = 4096


def tensors(count: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors in order: the same block `count` times, then the rest."""
    block = stored_block("fp8_scaled", device)
    for index in range(count):
        for name, weight in block.items():
            yield f"blocks.{index}.{name}", weight.data if len(weight.shape) == 2 else weight.data.half()
            if "scale" in weight.params:
                layer = name.removesuffix("weight")
                yield f"blocks.{index}.{layer}scale_weight", weight.params["scale"].reshape(())
    shapes = {
        "patch_embedding.weight": (DIM, 16, 1, 2, 2),
        "text_embedding.0.weight": (DIM, TEXT),
        "text_embedding.2.weight": (DIM, DIM),
        "time_embedding.0.weight": (DIM, 256),
        "time_embedding.2.weight": (DIM, DIM),
        "time_projection.1.weight": (6 * DIM, DIM),
        "head.head.weight": (64, DIM),
    }
    generator = torch.Generator().manual_seed(1)
    for name, shape in shapes.items():
        yield name, (torch.randn(shape, generator=generator) * torch.Size(shape[1:]).numel() ** -0.5).half()
        yield name.replace("weight", "bias"), torch.zeros(shape[0], dtype=torch.float16)
    yield "head.modulation", torch.randn(1, 2, DIM, generator=generator).half() * DIM**-0.5
    yield "scaled_fp8", torch.zeros(0, dtype=torch.float8_e4m3fn)


def write_file(path: Path, count: int, device: torch.device) -> None:
    """A safetensors file; its writer would refuse tensors that share memory."""
    names = {torch.float8_e4m3fn: "F8_E4M3", torch.float16: "F16", torch.float32: "F32"}
    entries = list(tensors(count, device))
    header, offset = {}, 0
    for name, tensor in entries:
        end = offset + tensor.nbytes
        header[name] = {"dtype": names[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, tensor in entries:
            file.write(memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy()))
