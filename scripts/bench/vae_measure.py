"""Time, peak and error of one VAE pass."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLWan

from wanfit.errors import WanFitError
from wanfit.pipeline.video import VideoWriter
from wanfit.vae import OrderedFrames, Step, TilePlan, decode
from wanfit.vae.adapters import describe
from wanfit.vae.windows import decoded_size


def resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * 4096
    import psutil

    return psutil.Process().memory_info().rss


def measure(device: str, call: Callable[[], Any]) -> tuple[Any, dict[str, Any]]:
    """The result and its figures, or the error's text."""
    gc.collect()
    figures: dict[str, Any] = {"peak_bytes": None, "reserved_bytes": None}
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    started = time.perf_counter()
    try:
        result = call()
    except (torch.OutOfMemoryError, WanFitError) as error:
        return None, {"error": str(error).partition("\n")[0]}
    if device == "cuda":
        torch.cuda.synchronize()
        figures["peak_bytes"] = torch.cuda.max_memory_allocated()
        figures["reserved_bytes"] = torch.cuda.max_memory_reserved()
    return result, {"time_s": round(time.perf_counter() - started, 3), **figures}


class Differences:
    """Against a reference on the host, a few frames at a time."""

    def __init__(self, reference: torch.Tensor | None, truth: torch.Tensor | None) -> None:
        self.reference, self.truth = reference, truth

    def of(self, video: torch.Tensor | None) -> dict[str, Any]:
        largest, mean = self._compare(video, self.reference)
        found: dict[str, Any] = {"max_abs_diff": largest, "mean_abs_diff": mean}
        if self.truth is not None:
            found["mean_abs_error"] = self._compare(video, self.truth)[1]
        return found

    @staticmethod
    def _compare(video: torch.Tensor | None, other: torch.Tensor | None) -> tuple[float | None, float | None]:
        if video is None or other is None:
            return None, None
        largest, total = 0.0, 0.0
        for frame in range(video.shape[2]):
            gap = (video[:, :, frame].float() - other[:, :, frame].float()).abs()
            largest, total = max(largest, gap.max().item()), total + gap.mean().item()
        return largest, total / video.shape[2]


def write_video(
    path: Path, vae: AutoencoderKLWan, latents: torch.Tensor, plan: TilePlan, device: str
) -> dict[str, Any]:
    """Figures of a decode into an MP4, the growth of host memory among them."""
    taken: list[int] = []
    highest = base = resident_bytes()

    def consume(item: int, number: int, pixels: torch.Tensor) -> None:
        taken.append(number)
        writer.write(pixels[None])

    def sample(step: Step) -> None:
        nonlocal highest
        highest = max(highest, resident_bytes())

    frames, height, width = decoded_size(describe(vae), latents.shape)
    sink = OrderedFrames(consume, directory=path.parent)
    with VideoWriter(path, width=width, height=height, fps=16, num_frames=frames) as writer:
        report, figures = measure(
            device, lambda: decode(vae, latents, plan, sink, device=torch.device(device), before_step=sample)
        )
    sink.close()
    return {
        **figures,
        "frames": len(taken),
        "in_order": taken == sorted(taken),
        "host_growth_bytes": highest - base,
        "video_bytes": path.stat().st_size,
        "waiting_file_bytes": sink.waiting_file_bytes,
        "feature_file_bytes": report.spooled_bytes if report else None,
    }
