"""What the doctor node does: the engine's findings, and ComfyUI's options that matter for memory and speed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import comfy.model_management
import folder_paths
from comfy.cli_args import args

from ...src.wanfit.memory.allocator import Finding
from ...src.wanfit.memory.doctor import examine
from ...src.wanfit.memory.report import finding_lines

_OPTIONS = {
    "cpu": ("note", "everything runs on the CPU"),
    "gpu_only": ("warning", "text encoder and VAE stay in VRAM: less is left for WanFit's blocks"),
    "highvram": ("warning", "models stay in VRAM after use: less is left for WanFit's blocks"),
    "lowvram": ("note", "has no effect on a WanFit MODEL, whose blocks are streamed anyway"),
    "novram": ("note", "has no effect on a WanFit MODEL, whose blocks are streamed anyway"),
    "disable_smart_memory": ("note", "models leave VRAM after each use and are brought back for the next"),
    "disable_cuda_malloc": ("ok", "PyTorch's own allocator, whose counters are complete"),
    "cuda_malloc": ("note", "cudaMallocAsync: some counters of fragmentation cannot be read"),
    "disable_pinned_memory": ("note", "for ComfyUI's own models; WanFit pins what it needs"),
    "disable_mmap": ("warning", "ComfyUI reads whole files into RAM; WanFit maps its own"),
    "cache_none": ("note", "nothing is cached between runs: everything is computed again"),
    "disable_dynamic_vram": ("ok", "models are loaded the older way"),
    "force_fp16": ("note", "computes in float16"),
    "force_fp32": ("warning", "computes in float32: twice the memory of bfloat16"),
    "use_split_cross_attention": ("warning", "slower than PyTorch's attention; Wan's needs PyTorch's or better"),
    "use_quad_cross_attention": ("warning", "slower than PyTorch's attention; Wan's needs PyTorch's or better"),
    "use_sage_attention": ("ok", "SageAttention, also for WanFit while its policy leaves attention at auto"),
    "use_flash_attention": ("ok", "flash attention, also for WanFit while its policy leaves attention at auto"),
}


def report(*, disk: bool) -> str:
    """All findings as text. `disk`: measure how fast the first folder of diffusion models that exists reads."""
    folders = [Path(path) for path in folder_paths.get_folder_paths("diffusion_models") if Path(path).is_dir()]
    return "\n".join(finding_lines([*_options(), *examine(folders[0] if disk and folders else None)]))


def _options() -> Iterator[Finding]:
    given = False
    for name, (state, text) in _OPTIONS.items():
        if getattr(args, name, None):
            given = True
            yield Finding("ComfyUI", state, f"--{name.replace('_', '-')}: {text}")  # pyright: ignore[reportArgumentType]
    reserved = getattr(args, "reserve_vram", None)
    if reserved:
        given = True
        yield Finding("ComfyUI", "ok", f"--reserve-vram {reserved:g}: GiB that are left to other programs")
    management = getattr(comfy, "memory_management", None)  # absent in 0.3.64
    if getattr(management, "aimdo_enabled", False):
        yield Finding(
            "ComfyUI",
            "note",
            "dynamic VRAM is on: where the driver ends with an access violation, --disable-dynamic-vram shows whether "
            "it is that",
        )
    if not given:
        yield Finding("ComfyUI", "ok", "no options that matter for memory are set")
