"""diffusers' Wan VAE, from a checkpoint in any layout."""

from __future__ import annotations

import torch
from accelerate import init_empty_weights

from ..checkpoint import Checkpoint, to_diffusers_vae
from ..quant import dequantize
from ..vae.config import diffusers_config
from .decode import TiledVae


def load_vae(checkpoint: Checkpoint, dtype: torch.dtype) -> TiledVae:
    """The VAE on the CPU in `dtype`.

    Memory: its weights in `dtype` (2.1: 0.24 GiB, 2.2: 1.3 GiB in 16 bit).
    """
    variant = checkpoint.identity.variant
    shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
    widths = {
        "base_dim": shapes["encoder.conv1.weight"][0],
        "decoder_base_dim": shapes["decoder.head.0.gamma"][0],
    }
    with init_empty_weights():
        vae = TiledVae(**diffusers_config(variant, **widths))
    state = {to_diffusers_vae(name, variant): dequantize(checkpoint.load(name), dtype) for name in checkpoint.tensors}
    vae.load_state_dict(state, strict=True, assign=True)
    return vae.eval().requires_grad_(False)
