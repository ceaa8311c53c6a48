"""Random weights of tiny Wan models, by canonical name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from ..checkpoint.structure import Shape, transformer_tensors, vae_tensors

# variant -> what tells its layout from the others
_LAYOUTS: Mapping[str, dict[str, int]] = {
    "t2v-a14b": {"in_channels": 16, "out_channels": 16},
    "i2v-a14b": {"in_channels": 36, "out_channels": 16},
    "ti2v-5b": {"in_channels": 48, "out_channels": 48},
    "i2v-14b": {"in_channels": 36, "out_channels": 16, "image_dim": 1280},
    "flf2v-14b": {"in_channels": 36, "out_channels": 16, "image_dim": 1280, "image_positions": 514},
}
_VAES: Mapping[str, dict[str, int]] = {
    "vae-2.1": {"latent_channels": 16, "pixel_channels": 3},
    "vae-2.2": {"latent_channels": 48, "pixel_channels": 12},
}


def transformer_weights(
    variant: str = "i2v-a14b",
    *,
    dim: int = 256,
    ffn_dim: int = 512,
    num_layers: int = 2,
    text_dim: int = 4096,
    seed: int = 0,
) -> dict[str, torch.Tensor]:
    """float32 weights of a tiny transformer; the same seed gives the same weights.

    Args:
        dim, ffn_dim: multiples of 256, so that every linear can be stored in any GGUF type.
    """
    sizes: dict[str, Any] = {"dim": dim, "ffn_dim": ffn_dim, "num_layers": num_layers, "text_dim": text_dim}
    return random_weights(transformer_tensors(**sizes, freq_dim=256, **_LAYOUTS[variant]), seed)


def vae_weights(
    variant: str = "vae-2.1", *, base_dim: int = 8, decoder_base_dim: int = 8, seed: int = 0
) -> dict[str, torch.Tensor]:
    """float32 weights of a tiny VAE; the same seed gives the same weights."""
    shapes = vae_tensors(variant, base_dim=base_dim, decoder_base_dim=decoder_base_dim, **_VAES[variant])
    return random_weights(shapes, seed)


def random_weights(shapes: Mapping[str, Shape], seed: int) -> dict[str, torch.Tensor]:
    """Values that keep activations near 1: matrices and kernels by fan-in, norm weights around 1, the rest small."""
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, generator=generator)
        if name.endswith(".gamma") or (name.endswith(".weight") and len(shape) == 1):
            weights[name] = 1 + 0.1 * tensor
        elif name.endswith(".weight"):
            weights[name] = tensor * math.prod(shape[1:]) ** -0.5
        else:
            weights[name] = 0.1 * tensor
    return weights
