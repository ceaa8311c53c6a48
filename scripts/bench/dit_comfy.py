"""A 14B model with random weights, sampled by ComfyUI in a process of its own: seconds of a step, memory.

ComfyUI's own model, or the MODEL that the loader node of WanFit or of ComfyUI-GGUF gives. Started by `dit.py --comfy`;
prints one line of JSON. Dynamic VRAM is turned on as in ComfyUI's main.py, before anything touches CUDA.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

GIB = 2**30
SEQUENCE, TEXT = 512, 4096


def used_vram() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


class Watch(threading.Thread):
    """The most device memory that was in use, by whatever allocator, beyond what was `before` (default: is now)."""

    def __init__(self, before: int | None = None) -> None:
        super().__init__(daemon=True)
        self.before = used_vram() if before is None else before
        self.peak, self._ended = 0, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.01):
            self.look()

    def look(self) -> None:
        self.peak = max(self.peak, used_vram() - self.before)

    def restart(self) -> None:
        """Forget what was seen so far; what was before stays the same."""
        self.peak = 0

    def end(self) -> float:
        self._ended.set()
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
    try:
        comfy_aimdo.control.init(simple_vram_headroom=None, nvml_pressure=True)
    except TypeError:
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


def pack(root: Path, name: str) -> None:
    """Import a custom node pack from its folder, as ComfyUI does."""
    spec = importlib.util.spec_from_file_location(name, root / "__init__.py")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)


def wanfit_loader() -> Callable[[Path], object]:
    """What WanFit's loader node calls, from this checkout."""
    pack(Path(__file__).resolve().parents[2], "wanfit_pack")
    load = importlib.import_module("wanfit_pack.nodes._comfy.model").load_models
    open_checkpoint = importlib.import_module("wanfit_pack.src.wanfit.checkpoint").open_checkpoint
    return lambda file: load([open_checkpoint(file)])[0]


def gguf_loader(root: Path) -> Callable[[Path], object]:
    """The loader node of ComfyUI-GGUF."""
    import folder_paths

    pack(root, "gguf_pack")

    def load(file: Path) -> object:
        folder_paths.add_model_folder_path("diffusion_models", str(file.parent))
        return sys.modules["gguf_pack"].NODE_CLASS_MAPPINGS["UnetLoaderGGUF"]().load_unet(file.name)[0]

    return load


def loader(options: argparse.Namespace) -> Callable[[Path], object]:
    """Everything is imported when this returns."""
    if options.wanfit:
        return wanfit_loader()
    if options.gguf_nodes:
        return gguf_loader(options.gguf_nodes)
    import comfy.sd

    return lambda file: comfy.sd.load_diffusion_model(str(file))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--comfy", type=Path, required=True)
    parser.add_argument("--file", type=Path, required=True, help="the weights")
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--width", type=int, default=832)
    parser.add_argument("--height", type=int, default=480)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--wanfit", action="store_true", help="WanFit's MODEL, not ComfyUI's own")
    parser.add_argument("--gguf-nodes", type=Path, help="MODEL of this tree of ComfyUI-GGUF")
    parser.add_argument("--latents", type=Path, required=True, help="file for the latents that come out")
    options = parser.parse_args()
    dynamic = start_comfy(options.comfy)
    import comfy.sample

    load = loader(options)
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
            model = load(options.file)
            latents = comfy.sample.sample(
                model, noise, options.steps, 1.0, "euler", "simple", [[text, {}]], [[text, {}]], latent,
                callback=after, disable_pbar=True, seed=7,
            )  # fmt: skip
        safetensors.torch.save_file({"latents": latents.float().cpu()}, options.latents)
    except torch.cuda.OutOfMemoryError as error:
        row["failure"] = f"out of memory: {str(error)[:160]}"
    times = [round(b - a, 3) for a, b in itertools.pairwise(marks)]
    if len(times) > 1:
        row |= {"seconds": min(times[1:]), "worst": max(times[1:]), "first": times[0], "times": times}
    row |= {"allocated": torch.cuda.max_memory_allocated() / GIB, "used": watch.end()}
    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
