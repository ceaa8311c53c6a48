"""Exactness of the tiled VAE passes: every grid up to 4x4 against the untiled pass of diffusers, float32 on the CPU.

    python scripts/dev.py bench vae --exact [--json]

Both VAEs at small width with random weights, odd sizes, 1 to 5 latent frames. One line for each VAE, direction and
size: the largest difference on a range of 2 (decode) or of the latent's own values (encode), and how many of the 16
grids are equal to the last bit. With oneDNN, as PyTorch uses it by default, and without, when one convolution algorithm
serves all sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers import AutoencoderKLWan

from wanfit.vae import HostFrames, TileReport, decode, encode, plan_decode, plan_encode

GRIDS = tuple(itertools.product((1, 2, 3, 4), repeat=2))
SIZES = ((1, 5, 7), (2, 5, 3), (3, 3, 5), (4, 3, 3), (5, 3, 3))
ENCODE_SIZES = ((1, 9, 11), (2, 9, 9), (3, 9, 9), (4, 9, 9), (5, 9, 9))


@torch.no_grad()
def sweep(make: Callable[[str], AutoencoderKLWan], emit: Callable[..., None]) -> None:
    for onednn, variant in itertools.product((True, False), ("vae-2.1", "vae-2.2")):
        vae = make(variant)
        with torch.backends.mkldnn.flags(enabled=onednn):
            for direction, sizes in (("decode", SIZES), ("encode", ENCODE_SIZES)):
                for size in sizes:
                    figures = _figures(_differences(vae, direction, size))
                    emit(f"{variant} {direction}", "onednn" if onednn else "no onednn", latents=list(size), **figures)


def _figures(differences: Iterator[tuple[float, TileReport]]) -> dict[str, Any]:
    found = list(differences)
    largest = max(difference for difference, _ in found)
    return {
        "grids": len(found),
        "tiles": sum(report.tiles for _, report in found),
        "max_abs_diff": largest,
        "equal_grids": sum(difference == 0 for difference, _ in found),
    }


def _differences(
    vae: AutoencoderKLWan, direction: str, size: tuple[int, int, int]
) -> Iterator[tuple[float, TileReport]]:
    frames, height, width = size
    float32 = torch.float32
    torch.manual_seed(1)
    if direction == "decode":
        latents = torch.randn(1, vae.config.z_dim, *size)
        expected = vae.decode(latents).sample
        for number, grid in enumerate(GRIDS):
            plan = plan_decode(vae, latents.shape, dtype=float32, grid=grid, start=number % 3)
            sink = HostFrames(float32)
            report = decode(vae, latents, plan, sink)
            yield (sink.video - expected).abs().max().item(), report
        return
    scale = vae.config.scale_factor_spatial
    video = torch.rand(1, 3, 1 + (frames - 1) * 4, height * scale, width * scale) * 2 - 1
    mean = vae.encode(video).latent_dist.mean
    for grid in GRIDS:
        encoded = encode(vae, video, plan_encode(vae, video.shape, dtype=float32, grid=grid))
        yield (encoded.mean - mean).abs().max().item(), encoded.report
