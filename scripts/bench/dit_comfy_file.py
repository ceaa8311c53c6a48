"""The files that `dit_comfy.py` gives to ComfyUI: random weights, laid out as the published fp8 and GGUF files are."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from dit_weights import DIM, stored_block

TEXT = 4096


def rest(generator: torch.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """What is no block, in float32."""
    shapes = {
        "patch_embedding.weight": (DIM, 16, 1, 2, 2),
        "text_embedding.0.weight": (DIM, TEXT),
        "text_embedding.2.weight": (DIM, DIM),
        "time_embedding.0.weight": (DIM, 256),
        "time_embedding.2.weight": (DIM, DIM),
        "time_projection.1.weight": (6 * DIM, DIM),
        "head.head.weight": (64, DIM),
    }
    for name, shape in shapes.items():
        yield name, torch.randn(shape, generator=generator) * torch.Size(shape[1:]).numel() ** -0.5
        yield name.replace("weight", "bias"), torch.zeros(shape[0])
    yield "head.modulation", torch.randn(1, 2, DIM, generator=generator) * DIM**-0.5


def tensors(count: int, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """The file's tensors in order: the same block `count` times, then the rest."""
    block = stored_block("fp8_scaled", device)
    for index in range(count):
        for name, weight in block.items():
            yield f"blocks.{index}.{name}", weight.data if len(weight.shape) == 2 else weight.data.half()
            if "scale" in weight.params:
                layer = name.removesuffix("weight")
                yield f"blocks.{index}.{layer}scale_weight", weight.params["scale"].reshape(())
    for name, value in rest(torch.Generator().manual_seed(1)):
        yield name, value.half()
    yield "scaled_fp8", torch.zeros(0, dtype=torch.float8_e4m3fn)


def write_safetensors(path: Path, count: int, device: torch.device) -> None:
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


def write_gguf(path: Path, count: int, device: torch.device, layout: str = "q4_k") -> None:
    """A GGUF file as city96's converter writes it: 5-D shapes in the metadata, vectors in float32."""
    block = stored_block(layout, device)
    writer = gguf.GGUFWriter(path, "wan")
    for index in range(count):
        for name, weight in block.items():
            quantised = len(weight.shape) == 2
            data = weight.data if quantised else weight.data.float()
            kind = gguf.GGMLQuantizationType[layout.upper()] if quantised else None
            writer.add_tensor(f"blocks.{index}.{name}", data.numpy(), raw_dtype=kind)
    for name, value in rest(torch.Generator().manual_seed(1)):
        if value.ndim > 4:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", list(value.shape))
            value = value.flatten(1, 2)
        writer.add_tensor(name, (value.half() if value.ndim > 1 else value).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
