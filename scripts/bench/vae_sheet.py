"""A picture of where tiled decodes differ from the untiled one: ours and diffusers', small VAEs with random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLWan
from PIL import Image, ImageDraw
from vae_comfy import comfy_tiled

from wanfit.vae import HostFrames, decode, plan_decode

_TILE, _OVERLAP = 160, 40
_LATENTS = {"vae-2.1": (2, 40, 60), "vae-2.2": (2, 20, 30)}
_LINE = 16


@torch.no_grad()
def draw(make: Callable[[str], AutoencoderKLWan], path: Path, comfy: Path | None) -> None:
    """One row for each VAE, the last of 5 frames of 480x320: the untiled picture, then differences, amplified.

    `comfy`: a source tree; its tiled decode too, for VAE 2.1 (it reads the other at its real width only).
    """
    rows: list[Image.Image] = []
    for variant, (frames, height, width) in _LATENTS.items():
        vae = make(variant)
        torch.manual_seed(2)
        coarse = torch.randn(1, vae.config.z_dim, frames, height // 5, width // 5)
        latents = F.interpolate(coarse, size=(frames, height, width), mode="trilinear")
        untiled = vae.decode(latents).sample
        vae.enable_tiling(_TILE, _TILE, _TILE - _OVERLAP, _TILE - _OVERLAP)
        blended = vae.decode(latents).sample
        plan = plan_decode(vae, latents.shape, dtype=torch.float32, grid=(3, 4))
        sink = HostFrames()
        decode(vae, latents, plan, sink)
        others = [(f"diffusers, tiles of {_TILE}", blended, 4)]
        if comfy is not None and variant == "vae-2.1":
            tiled, _ = comfy_tiled(comfy, variant, vae, latents, device="cpu", tile=_TILE, overlap=_OVERLAP)
            others.append((f"ComfyUI, tiles of {_TILE}", tiled, 4))
        others += [("WanFit, 3x4 tiles", sink.video, gain) for gain in (4, 100000)]
        names = [f"{variant}, untiled (random weights)"]
        pictures = [(untiled + 1) / 2]
        for who, other, gain in others:
            gap = (other - untiled).abs()
            names.append(f"{who}: |difference| x {gain}, largest {gap.max().item():.1e}")
            pictures.append(gap / 2 * gain)
        print(*names, sep="\n")
        rows.append(_beside([_titled(picture[0, :, -1], name) for picture, name in zip(pictures, names, strict=True)]))
    sheet = Image.new("RGB", (max(row.width for row in rows), sum(row.height for row in rows)), "white")
    top = 0
    for row in rows:
        sheet.paste(row, (0, top))
        top += row.height
    sheet.quantize(128).save(path, optimize=True)


def _titled(picture: torch.Tensor, title: str) -> Image.Image:
    pixels = (picture.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
    framed = Image.new("RGB", (pixels.shape[1] + 4, pixels.shape[0] + _LINE + 4), "white")
    framed.paste(Image.fromarray(pixels), (0, _LINE))
    ImageDraw.Draw(framed).text((2, 2), title, fill="black")
    return framed


def _beside(pictures: list[Image.Image]) -> Image.Image:
    row = Image.new("RGB", (sum(picture.width for picture in pictures), pictures[0].height), "white")
    left = 0
    for picture in pictures:
        row.paste(picture, (left, 0))
        left += picture.width
    return row
