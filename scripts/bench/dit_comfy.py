"""ComfyUI's own 14B model with random scaled fp8 weights, sampled in a process of its own: seconds of a step, memory.

Started by `dit.py --comfy PATH`; prints one line of JSON. Dynamic VRAM is turned on as ComfyUI's main.py does it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from dit_weights import DIM, stored_block

GIB = 2**30
SEQUENCE, TEXT = 512, 4096


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


class Watch(threading.Thread):
    """The most device memory that was in use, by whatever allocator, beyond what was before."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self._used()
        self.peak, self._stop = 0, threading.Event()

    def _used(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def run(self) -> None:
        while not self._stop.wait(0.01):
            self.peak = max(self.peak, self._used() - self.before)

    def end(self) -> float:
        self._stop.set()
        self.join()
        return self.peak / GIB


def start_comfy(tree: Path) -> bool:
    """Import it, with dynamic VRAM if it can; whether it could."""
    sys.argv = ["main.py"]
    sys.path.insert(0, str(tree))
    import comfy.options

    comfy.options.enable_args_parsing()
    try:
        import comfy_aimdo.control
    except ImportError:
        return False
    comfy_aimdo.control.init()
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher

    try:
        started = comfy_aimdo.control.init_devices([(0, 0)])
    except TypeError:
        started = comfy_aimdo.control.init_devices([0])
    if started:
        comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
        comfy.memory_management.aimdo_enabled = True
    return bool(started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comfy", type=Path, required=True)
    parser.add_argument("--folder", type=Path, required=True, help="for the weights' file")
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    path = options.folder / f"comfy-fp8-{options.blocks}.safetensors"
    options.folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_file(path, options.blocks, torch.device("cuda", 0))
        torch.cuda.empty_cache()
    dynamic = start_comfy(options.comfy)
    import comfy.sample
    import comfy.sd

    watch = Watch()
    watch.start()
    torch.cuda.reset_peak_memory_stats()
    latent = torch.zeros(1, 16, (options.frames - 1) // 4 + 1, options.height // 8, options.width // 8)
    noise = torch.randn(latent.shape, generator=torch.Generator().manual_seed(7))
    text = torch.randn(1, SEQUENCE, TEXT, generator=torch.Generator().manual_seed(8))
    marks = [time.perf_counter()]

    def after(*_: object) -> None:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())

    row: dict[str, object] = {"dynamic_vram": dynamic, "seconds": None}
    try:
        with torch.inference_mode():
            model = comfy.sd.load_diffusion_model(str(path))
            comfy.sample.sample(
                model, noise, options.steps, 1.0, "euler", "simple", [[text, {}]], [[text, {}]], latent,
                callback=after, disable_pbar=True, seed=7,
            )  # fmt: skip
    except torch.cuda.OutOfMemoryError as error:
        row["failure"] = f"out of memory: {str(error)[:160]}"
    times = [round(b - a, 3) for a, b in itertools.pairwise(marks)]
    if len(times) > 1:
        row |= {"seconds": min(times[1:]), "worst": max(times[1:]), "first": times[0], "times": times}
    row |= {"allocated": torch.cuda.max_memory_allocated() / GIB, "used": watch.end()}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
