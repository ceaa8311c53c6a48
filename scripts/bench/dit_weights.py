"""Random weights of the 14B transformer in a layout of a real file, and random inputs for it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import init_empty_weights

from wanfit.blocks import BlockShape, WeightSource
from wanfit.checkpoint.mapped import MappedFile
from wanfit.offload import Ladder
from wanfit.offload.layout import BlockLayout
from wanfit.pipeline.transformer import LeanTransformer
from wanfit.quant import StoredWeight, dequantize

SIZES = {"480p": (832, 480), "720p": (1280, 720), "1088p": (1920, 1088)}
DIM, FFN, HEADS = 5120, 13824, 40
LAYOUTS = ("bf16", "fp8_scaled", "q8_0", "q4_k", "q5_k", "q6_k")
SHAPE = BlockShape(DIM, HEADS, FFN)
CONFIG = {
    "num_attention_heads": HEADS,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "ffn_dim": FFN,
}
_BLOCK_BYTES = {"q8_0": (34, 32), "q4_k": (144, 256), "q5_k": (176, 256), "q6_k": (210, 256)}
_HALVES = {
    "q8_0": {0: 2.7e-4},
    "q4_k": {0: 1.3e-4, 2: 1e-3},
    "q5_k": {0: 6.5e-5, 2: 1e-3},
    "q6_k": {208: 1.5e-5},
}


def inputs(size: str, frames: int, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    width, height = SIZES[size]
    generator = torch.Generator(device).manual_seed(7)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    return {
        "hidden_states": noise(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8),
        "timestep": torch.tensor([700.0], device=device),
        "encoder_hidden_states": noise(1, 512, 4096),
    }


def linear_shapes() -> dict[str, tuple[int, int]]:
    square = {f"{part}_attn.{name}.weight": (DIM, DIM) for part in ("self", "cross") for name in "qkvo"}
    return square | {"ffn.0.weight": (FFN, DIM), "ffn.2.weight": (DIM, FFN)}


def base_block(device: torch.device, seed: int = 0) -> dict[str, torch.Tensor]:
    """float32 values of one block, drawn on `device`: linears N(0, 0.02), the rest as a trained file has them."""
    torch.manual_seed(seed)
    linears = {name: torch.randn(shape, device=device) * 0.02 for name, shape in linear_shapes().items()}
    rest: dict[str, torch.Tensor] = {}
    for name, (out, _) in linear_shapes().items():
        rest[name.replace("weight", "bias")] = torch.randn(out, device=device) * 0.02
    for part in ("self", "cross"):
        for name in "qk":
            rest[f"{part}_attn.norm_{name}.weight"] = 1 + 0.1 * torch.randn(DIM, device=device)
    rest["norm3.weight"] = 1 + 0.1 * torch.randn(DIM, device=device)
    rest["norm3.bias"] = 0.1 * torch.randn(DIM, device=device)
    rest["modulation"] = torch.randn(1, 6, DIM, device=device) * 0.1
    return linears | rest


def stored_block(layout: str, device: torch.device, seed: int = 0) -> dict[str, StoredWeight]:
    """The block in a layout, on the CPU: bf16; fp8 with one scale a linear; GGUF blocks of random bits."""
    return {name: weight.to("cpu") for name, weight in drawn_block(layout, device, seed).items()}


def drawn_block(layout: str, device: torch.device, seed: int) -> dict[str, StoredWeight]:
    """The same on `device`."""
    block: dict[str, StoredWeight] = {}
    for name, value in base_block(device, seed).items():
        if value.ndim != 2 or layout == "bf16":
            wide = name.startswith(("modulation", "norm3")) and layout != "bf16"
            dtype = torch.float32 if wide else torch.bfloat16
            block[name] = StoredWeight("f32" if wide else "bf16", tuple(value.shape), value.to(dtype))
        elif layout == "fp8_scaled":
            scale = value.abs().max() / 448
            data = (value / scale).to(torch.float8_e4m3fn)
            block[name] = StoredWeight("f8_e4m3", tuple(value.shape), data, {"scale": scale})
        else:
            block[name] = StoredWeight(layout, tuple(value.shape), _random_blocks(layout, *value.shape).to(device))
    return block


def _random_blocks(layout: str, rows: int, columns: int) -> torch.Tensor:
    nbytes, elements = _BLOCK_BYTES[layout]
    data = torch.randint(0, 256, (rows, columns // elements * nbytes), dtype=torch.uint8)
    blocks = data.view(-1, nbytes)
    for offset, value in _HALVES[layout].items():
        blocks[:, offset : offset + 2] = torch.tensor([value], dtype=torch.float16).view(torch.uint8)
    return data


def as_float32(block: Mapping[str, StoredWeight]) -> dict[str, StoredWeight]:
    """The same values as stored, in float32."""
    return {k: StoredWeight("f32", w.shape, dequantize(w, torch.float32)) for k, w in block.items()}


class DrawnBlocks:
    """`WeightSource` of different blocks, each drawn on the device from its own seed when its turn comes.

    Args:
        exact: the stored values, in float32.
    """

    def __init__(self, layout: str, device: torch.device, *, exact: bool = False) -> None:
        self._layout, self._device, self._exact = layout, device, exact

    @contextmanager
    def onload(self, index: int) -> Iterator[Mapping[str, StoredWeight]]:
        block = drawn_block(self._layout, self._device, index)
        yield as_float32(block) if self._exact else block


class RepeatedFile:
    """`StoredTensors` in which every block is the same."""

    def __init__(self, block: Mapping[str, StoredWeight], count: int) -> None:
        self._block = block
        self.tensors = {f"blocks.{i}.{key}": key for i in range(count) for key in block}

    def load(self, name: str) -> StoredWeight:
        return self._block[self.tensors[name]]

    def forget(self, name: str) -> None:
        """Nothing is mapped."""


class DiskFile:
    """`StoredTensors` over a real file that holds the block's bytes once for each of `count` blocks."""

    def __init__(self, block: Mapping[str, StoredWeight], count: int, path: Path) -> None:
        self._layout = BlockLayout(block)
        self.tensors = {f"blocks.{i}.{key}": (i, key) for i in range(count) for key in block}
        if not path.exists():
            buffer = torch.zeros(self._layout.nbytes, dtype=torch.uint8)
            self._layout.write(block, buffer)
            with path.open("wb") as file:
                for _ in range(count):
                    file.write(memoryview(buffer.numpy()))
                os.fsync(file.fileno())
        self._path = path
        self._file = MappedFile(path)

    def forget_pages(self) -> None:
        """Ask the system to drop the file from its cache, so that the next read comes from the disk."""
        with self._path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def load(self, name: str) -> StoredWeight:
        index, key = self.tensors[name]
        size = self._layout.nbytes
        return self._layout.view(self._file.tensor(index * size, size, torch.uint8, (size,)))[key]

    def forget(self, name: str) -> None:
        index, key = self.tensors[name]
        size = self._layout.nbytes
        if key == "modulation":  # once for each block
            self._file.forget(index * size, size)


def build(source: WeightSource, ladder: Ladder, layers: int, device: torch.device) -> LeanTransformer:
    """The lean transformer with random small weights outside the blocks (0.23 B parameters), in bf16."""
    with init_empty_weights():
        model = LeanTransformer(**CONFIG, num_layers=layers)
    model.attach(source, SHAPE, ladder)
    fill_rest(model, device)
    return model.eval().requires_grad_(False)


def fill_rest(model: torch.nn.Module, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Give everything outside `model.blocks` random values on `device`, the same for every model and dtype."""
    rope = model.rope.to(device)
    state: dict[str, torch.Tensor] = {}
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in model.named_parameters():
        if not name.startswith("blocks."):
            value = torch.randn(parameter.shape, generator=generator, device=device)
            value *= 1.0 / DIM**0.5 if parameter.ndim == 1 or "table" in name else parameter[0].numel() ** -0.5
            wide = "time_embedder" in name or "scale_shift_table" in name
            state[name] = value.to(torch.float32 if wide else dtype)
    model.load_state_dict(state, strict=False, assign=True)
    model.rope = rope
