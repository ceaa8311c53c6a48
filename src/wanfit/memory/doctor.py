"""What this machine is and what the engine does on it; reads only, changes nothing."""

from __future__ import annotations

import os
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from ..quant.float8_matmul import float8_units
from ..quant.triton_support import triton_refusal
from ..vae.conv3d import trap_here
from .allocator import Finding, check_allocator
from .host import available_bytes, commit_room, group_limits, in_wsl, swap_in_use
from .nvml import open_gpu
from .record import gib
from .version_pairs import check_installed

_MODEL_FILES = (".safetensors", ".gguf")
READ_BYTES = 512 * 2**20
READ_SECONDS = 3.0
_PIECE = 8 * 2**20
_SEARCHED = 20_000
"""Folder entries that are looked at, at most, for a large file."""


@dataclass(frozen=True)
class DiskSpeed:
    """Bytes a second of reading one file in order; `cold` when its pages were dropped from the cache before."""

    file: Path
    read: int
    seconds: float
    cold: bool

    @property
    def bandwidth(self) -> float:
        return self.read / self.seconds


def examine(models: Path | None = None) -> list[Finding]:
    """All findings, by topic.

    Args:
        models: folder whose disk is measured: its largest model file is read for some seconds.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    return [
        *_software(device),
        *check_installed(torch.cuda.get_device_capability(device) if device.type == "cuda" else None),
        *_kernels(device),
        *check_allocator(os.environ, torch.__version__, sys.platform),
        *_allocator(device),
        *_memory(),
        *_card(device),
        *_disk(models),
    ]


def _software(device: torch.device) -> Iterator[Finding]:
    yield Finding(
        "software", "ok", f"Python {platform.python_version()}, torch {torch.__version__}, {platform.platform()}"
    )
    if torch.version.cuda is None:
        hip = torch.version.hip
        what = f"a ROCm build ({hip}), which WanFit is not tested on" if hip else "a build without CUDA"
        yield Finding(
            "software", "note", f"torch is {what}: everything runs on the CPU" if not hip else f"torch is {what}"
        )
        return
    cudnn = torch.backends.cudnn.version()
    yield Finding("software", "ok", f"CUDA {torch.version.cuda}, cuDNN {cudnn}")
    if device.type != "cuda":
        yield Finding(
            "software", "warning", "torch sees no CUDA device: driver missing or too old, or CUDA_VISIBLE_DEVICES"
        )
        return
    trap = trap_here(device, torch.bfloat16)
    if trap:
        yield Finding(
            "software",
            "warning",
            f"{trap}: the VAE's convolutions run one frame at a time as 2D ones; torch 2.9.1 or newer with cuDNN 9.15 "
            "or newer is faster",
        )


def _kernels(device: torch.device) -> Iterator[Finding]:
    if device.type != "cuda":
        yield Finding("kernels", "note", "plain PyTorch on the CPU, in float32; there is no CUDA device")
        return
    major, minor = torch.cuda.get_device_capability(device)
    yield Finding("kernels", "ok", f"{torch.cuda.get_device_name(device)}, compute capability {major}.{minor}")
    if (major, minor) < (7, 5):
        yield Finding("kernels", "wrong", "attention needs compute capability 7.5 or newer")
    dtype = "bfloat16" if (major, minor) >= (8, 0) else "float16 (bfloat16 is emulated before 8.0)"
    yield Finding("kernels", "ok", f"computes in {dtype}")
    if float8_units(device):
        yield Finding("kernels", "ok", "float8 weights are multiplied in float8")
    else:
        yield Finding(
            "kernels", "note", f"float8 weights are dequantised first: float8 units need 8.9, this is {major}.{minor}"
        )
    refusal = triton_refusal(device)
    if refusal is None:
        yield Finding("kernels", "ok", "Triton works: fused element-wise kernels, GGUF Q8_0, Q4_K, Q5_K, Q6_K")
    else:
        yield Finding("kernels", "note", f"no fused kernels: {refusal}")
    yield from _attention(device)


def _attention(device: torch.device) -> Iterator[Finding]:
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    q = torch.empty(1, 2, 256, 128, dtype=dtype, device=device)
    parameters = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
    usable: list[str] = []
    for name, kernel in (("cuDNN", "cudnn"), ("flash", "flash"), ("memory-efficient", "efficient")):
        check = getattr(torch.backends.cuda, f"can_use_{kernel}_attention", None)
        if check is not None and check(parameters):
            usable.append(name)
    if usable:
        yield Finding("kernels", "ok", f"attention kernels, first choice first: {', '.join(usable)}")
    else:
        yield Finding("kernels", "wrong", f"no memory-saving attention kernel takes {dtype} on this card")


def _allocator(device: torch.device) -> Iterator[Finding]:
    """What PyTorch's allocator runs with, whatever the environment asks for."""
    if device.type != "cuda":
        return
    backend, said = torch.cuda.get_allocator_backend(), ""
    if backend == "native":
        settings: Mapping[str, object] = torch.cuda.memory._snapshot().get("allocator_settings", {})  # pyright: ignore[reportPrivateUsage]
        known = ("expandable_segments", "max_split_size", "garbage_collection_threshold")
        said = "".join(f", {name} {settings[name]}" for name in known if name in settings)
    yield Finding("allocator", "ok", f"in use: {backend}{said}")


def _memory() -> Iterator[Finding]:
    memory, swap = psutil.virtual_memory(), swap_in_use()
    yield Finding("memory", "ok", f"RAM {gib(memory.total)}, {gib(available_bytes())} of it can be taken")
    name = "page file" if sys.platform == "win32" else "swap"
    if swap is None:
        yield Finding("memory", "unread", f"{name}: the system's performance counters are switched off")
    else:
        used, total = swap
        state = "warning" if sys.platform == "win32" and total < memory.total // 2 else "ok"
        yield Finding("memory", state, f"{name} {gib(total)}, {gib(used)} in use")
    room = commit_room()
    if room is not None:
        yield Finding("memory", "ok", f"{gib(room)} can still be promised to programs (commit limit)")
    for limit in group_limits():
        yield Finding(
            "memory", "note", f"a control group allows {gib(limit.limit)}, {gib(limit.room)} are left ({limit.path})"
        )
    if in_wsl():
        yield Finding(
            "memory",
            "warning",
            "WSL gives Linux half of the RAM unless `memory` in %UserProfile%\\.wslconfig says more",
        )


def _card(device: torch.device) -> Iterator[Finding]:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        yield Finding("card", "ok", f"VRAM {gib(total)}, {gib(free)} free for this process")
    gpu, reason = open_gpu(device if device.type == "cuda" else None)
    if gpu is None:
        yield Finding("card", "unread", f"driver version and the processes on the card: {reason}")
        return
    used, total = gpu.memory()
    yield Finding(
        "card", "ok", f"{gpu.name()}, driver {gpu.driver()}: {gib(used)} of {gib(total)} in use by all processes"
    )
    processes = gpu.processes()
    if not processes and device.type == "cuda":  # this one is there
        yield Finding("card", "unread", "the processes on the card: this system does not list them")
    for process in processes:
        own = " (this process)" if process.pid == os.getpid() else ""
        held = "an amount that the system hides" if process.used is None else gib(process.used)
        yield Finding("card", "note", f"process {process.pid} {process.name}{own} holds {held}")


def _disk(models: Path | None) -> Iterator[Finding]:
    if models is None:
        return
    if not models.is_dir():
        yield Finding("disk", "wrong", f"{models} is no folder")
        return
    file = _largest(models)
    if file is None:
        yield Finding("disk", "unread", f"{models} holds no model file to read")
        return
    try:
        speed = read_speed(file)
    except OSError as error:
        yield Finding("disk", "unread", f"{file} cannot be read: {error.strerror or error}")
        return
    source = "" if speed.cold else ", partly from the system's cache, which could not be emptied"
    state = "warning" if speed.cold and speed.bandwidth < 0.5e9 else "ok"
    yield Finding(
        "disk", state, f"{speed.bandwidth / 1e9:.2f} GB/s over {speed.read / 2**20:.0f} MiB of {file.name}{source}"
    )


def read_speed(file: Path, limit: int = READ_BYTES, seconds: float = READ_SECONDS) -> DiskSpeed:
    """Read the beginning of a file, up to `limit` bytes or for `seconds`."""
    descriptor = os.open(file, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        cold = False
        if sys.platform.startswith("linux"):
            os.posix_fadvise(descriptor, 0, limit, os.POSIX_FADV_DONTNEED)
            cold = True
        begin = time.perf_counter()
        done = 0
        while done < limit and time.perf_counter() - begin < seconds:
            piece = len(os.read(descriptor, min(_PIECE, limit - done)))
            if not piece:
                break
            done += piece
        return DiskSpeed(file, done, max(time.perf_counter() - begin, 1e-9), cold)
    finally:
        os.close(descriptor)


def _largest(folder: Path) -> Path | None:
    best: tuple[int, Path] | None = None
    seen = 0
    for root, _, names in os.walk(folder):
        for name in names:
            seen += 1
            path = Path(root) / name
            if path.suffix.lower() in _MODEL_FILES and path.is_file():
                size = path.stat().st_size
                best = (size, path) if best is None or size > best[0] else best
        if seen > _SEARCHED:
            break
    return best[1] if best else None
