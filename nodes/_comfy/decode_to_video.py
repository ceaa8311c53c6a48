"""A decode straight into a video file in ComfyUI's temp folder."""

from __future__ import annotations

import uuid
from fractions import Fraction
from pathlib import Path
from typing import Any

import folder_paths
from comfy_api.input_impl import VideoFromFile

from ...src.wanfit.pipeline.video import Audio, VideoWriter
from ...src.wanfit.vae.adapters import describe
from ...src.wanfit.vae.sinks import OrderedFrames
from ...src.wanfit.vae.windows import decoded_size
from . import checks, decode

_GIB = 1024**3


def video(
    samples: dict[str, Any], vae: Any, fps: float, vram_budget: float, audio: dict[str, Any] | None, node_id: str
) -> VideoFromFile:
    """ComfyUI's VIDEO over an MP4 that ComfyUI clears away with its temp folder; it is whole, or there is none.

    Args:
        samples: ComfyUI's LATENT: raw VAE latents, (B, C, T, h, w); videos of a batch follow each other.
        vram_budget: GiB; 0: what is free.
        audio: ComfyUI's AUDIO; the first of its batch is used.

    Raises:
        OutputError: the temp folder is full or cannot be written. InputError: audio_invalid.
        The rest as `decode.images`.
    Memory: on the device the plan's; on the host at most 0.75 GiB and a few frames, whatever the length (features
    and frames of unfinished rows beyond that wait in a file).
    """
    checks.finite({"fps": fps, "vram_budget": vram_budget})
    with decode.latent_kept(samples, node_id):
        latents = decode.checked(samples, vae)
        plan = decode.fitting(vae, latents, int(vram_budget * _GIB))
        folder = Path(folder_paths.get_temp_directory())
        folder.mkdir(parents=True, exist_ok=True)
        frames, height, width = decoded_size(describe(vae.first_stage_model), latents.shape)
        writer = VideoWriter(
            folder / f"wanfit_{uuid.uuid4().hex}.mp4",
            width=width,
            height=height,
            fps=Fraction(round(fps * 1000), 1000),
            num_frames=latents.shape[0] * frames,
            audio=None if audio is None else Audio(audio["waveform"][0], int(audio["sample_rate"])),
        )
        with writer:
            sink = OrderedFrames(lambda _item, _frame, pixels: writer.write(pixels[None]), directory=folder)
            try:
                decode.run(vae, latents, plan, sink, spool_directory=folder)
            finally:
                sink.close()
        return VideoFromFile(str(writer.path))
