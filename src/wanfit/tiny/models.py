"""Tiny models with random weights: the real tensors of each model, at small widths."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from safetensors import SafetensorError

from ..checkpoint.structure import transformer_tensors, vae_tensors
from ..errors import OutputError
from .gguf_layout import write_gguf
from .layouts import write_comfy_scaled, write_plain
from .text import make_text, write_comfy_fp8_scaled

CHANNELS = {
    "t2v-a14b": (16, 16),
    "i2v-a14b": (36, 16),
    "i2v-14b": (36, 16),
    "flf2v-14b": (36, 16),
    "ti2v-5b": (48, 48),
}


def tiny_transformer(
    variant: str = "i2v-a14b", *, seed: int = 0, dim: int = 256, ffn_dim: int = 512, num_layers: int = 2
) -> dict[str, torch.Tensor]:
    """Float32 weights of a transformer under canonical names; heads of 128, multiples of 256 for the K types."""
    inward, outward = CHANNELS[variant]
    shapes = transformer_tensors(
        dim=dim,
        ffn_dim=ffn_dim,
        num_layers=num_layers,
        in_channels=inward,
        out_channels=outward,
        text_dim=4096,
        freq_dim=256,
        image_dim=1280 if variant in ("i2v-14b", "flf2v-14b") else 0,
        image_positions=514 if variant == "flf2v-14b" else 0,
    )
    return _random(shapes, seed)


def tiny_vae(variant: str = "vae-2.1", *, seed: int = 0, base_dim: int = 16) -> dict[str, torch.Tensor]:
    """Float32 weights of a VAE under canonical names."""
    latent, pixel = (16, 3) if variant == "vae-2.1" else (48, 12)
    shapes = vae_tensors(
        variant, base_dim=base_dim, decoder_base_dim=base_dim, latent_channels=latent, pixel_channels=pixel
    )
    return _random(shapes, seed)


def write_tiny_models(folder: Path, *, seed: int = 0) -> list[Path]:
    """An I2V-A14B pair (high: scaled fp8, low: GGUF Q4_K_M), a UMT5 and a VAE, laid out like ComfyUI's models folder.

    Returns: the files written. Raises: OutputError when `folder` cannot be written.
    """
    try:
        for part in ("diffusion_models", "text_encoders", "vae"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        experts = folder / "diffusion_models"
        return [
            write_comfy_scaled(
                experts / "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors", tiny_transformer(seed=seed + 1)
            ),
            write_gguf(experts / "Wan2.2-I2V-A14B-LowNoise-Q4_K_M.gguf", tiny_transformer(seed=seed + 2), "Q4_K_M"),
            write_comfy_fp8_scaled(make_text(seed=seed + 3), folder / "text_encoders"),
            write_plain(folder / "vae" / "wan_2.1_vae.safetensors", tiny_vae(seed=seed + 4)),
        ]
    except (OSError, SafetensorError) as error:
        raise OutputError(
            "output_unwritable",
            "save",
            f"the tiny models cannot be written to {folder}: {getattr(error, 'strerror', None) or error}",
            "Give <out> a folder that can be written",
        ) from error


def _random(shapes: dict[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    """Values that keep the size of what goes through them, so that no layer explodes."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        values = torch.randn(shape, generator=generator)
        if name.endswith("modulation"):
            weights[name] = values / math.sqrt(shape[-1])
        elif name.endswith("bias") or name.endswith("emb_pos"):
            weights[name] = values * 0.02
        elif "norm" in name or name.endswith("gamma") or len(shape) == 1:
            weights[name] = 1 + values * 0.1
        else:
            weights[name] = values / math.sqrt(math.prod(shape[1:]))
    return weights
