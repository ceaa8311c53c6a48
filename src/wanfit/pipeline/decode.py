"""Latents to frames in a video file, and the start image to latents, by the exact tiled VAE passes."""

from __future__ import annotations

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput

from ..memory.device import free_bytes
from ..vae.config import denormalize
from ..vae.decode import decode
from ..vae.encode import encode
from ..vae.passes import TileReport
from ..vae.plan import plan_decode, plan_encode
from ..vae.sinks import OrderedFrames
from .video import VideoWriter


def device_budget(vae: AutoencoderKLWan) -> int | None:
    """Bytes for a pass, its weights included; None on the CPU, where frames are not cut."""
    if vae.device.type != "cuda":
        return None
    return free_bytes(vae.device) + sum(parameter.nbytes for parameter in vae.parameters())


class TiledVae(AutoencoderKLWan):
    """`AutoencoderKLWan` whose `encode` is cut into tiles that fit the device, with the same result."""

    def encode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: torch.Tensor, return_dict: bool = True
    ) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """As `AutoencoderKLWan.encode`. `x`: (B, 3, F, H, W) in [-1, 1], F = 4n+1."""
        plan = plan_encode(self, x.shape, dtype=self.dtype, device=self.device, budget_bytes=device_budget(self))
        encoded = encode(self, x, plan)
        distribution = DiagonalGaussianDistribution(torch.cat([encoded.mean, encoded.logvar], dim=1))
        return AutoencoderKLOutput(latent_dist=distribution) if return_dict else (distribution,)


def decode_to(vae: TiledVae, variant: str, latents: torch.Tensor, writer: VideoWriter) -> TileReport:
    """Decode into the video file, each frame as soon as it is complete.

    Args:
        latents: (1, C, T, h, w), normalised as the transformer sees them.
    Returns: the tile report.
    Memory: `plan.memory` on the device, whatever the length; see `OrderedFrames` for the host.
    """
    plan = plan_decode(vae, latents.shape, dtype=vae.dtype, device=vae.device, budget_bytes=device_budget(vae))
    sink = OrderedFrames(lambda _item, _number, pixels: writer.write(pixels.unsqueeze(0)))
    try:
        return decode(vae, denormalize(latents, variant), plan, sink)
    finally:
        sink.close()
