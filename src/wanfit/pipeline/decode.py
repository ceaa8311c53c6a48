"""Latents to frames in a video file, and the start image to latents, by the exact tiled VAE passes."""

from __future__ import annotations

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput

from ..memory.alarm import Alarm
from ..memory.demand import latents_bytes
from ..memory.device import free_bytes
from ..memory.tiles import beside_saving, plan_pass, with_margin
from ..vae.config import denormalize
from ..vae.decode import decode
from ..vae.encode import encode
from ..vae.passes import TileReport
from ..vae.plan import plan_decode, plan_encode
from ..vae.sinks import OrderedFrames
from ..vae.tile_plan import TilePlan
from .video import VideoWriter


def plan_tiles(vae: TiledVae, direction: str, given: torch.Tensor) -> TilePlan:
    """The tiles of a pass: within the run's budget, and within what is free at this moment.

    Without a budget, on the CPU: the whole frame.
    """
    shape, device, dtype, budget = given.shape, vae.device, vae.dtype, vae.budget_bytes
    if device.type == "cpu" and budget is None:
        plan = plan_encode if direction == "encode" else plan_decode
        return plan(vae, shape, dtype=dtype, device=device)

    def within(room: int) -> TilePlan:
        return plan_pass(vae, shape, direction, dtype, device, room)

    if device.type == "cuda":
        room = free_bytes(device)
        if budget is not None:
            room = min(room, budget - torch.cuda.memory_allocated(device))
        return with_margin(within, room)[0]
    room = (budget or 0) - sum(parameter.nbytes for parameter in vae.parameters())
    if direction == "encode":
        return with_margin(within, room - given.nbytes)[0]
    step, frames = vae.config["scale_factor_spatial"], vae.config["scale_factor_temporal"] * (shape[2] - 1) + 1
    decoding = beside_saving(within, step * shape[4], step * shape[3], frames)
    return with_margin(decoding, room - latents_bytes(shape))[0]


class TiledVae(AutoencoderKLWan):
    """`AutoencoderKLWan` whose `encode` is cut into tiles that fit the device, with the same result.

    Attributes:
        budget_bytes: for all that is on the device during a pass, its weights included; on the CPU: of RAM. None:
            what is free.
    """

    budget_bytes: int | None = None

    def encode(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x: torch.Tensor, return_dict: bool = True
    ) -> AutoencoderKLOutput | tuple[DiagonalGaussianDistribution]:
        """As `AutoencoderKLWan.encode`. `x`: (B, 3, F, H, W) in [-1, 1], F = 4n+1."""
        encoded = encode(self, x, plan_tiles(self, "encode", x))
        distribution = DiagonalGaussianDistribution(torch.cat([encoded.mean, encoded.logvar], dim=1))
        return AutoencoderKLOutput(latent_dist=distribution) if return_dict else (distribution,)


def decode_to(
    vae: TiledVae, variant: str, latents: torch.Tensor, writer: VideoWriter, alarm: Alarm | None = None
) -> TileReport:
    """Decode into the video file, each frame as soon as it is complete.

    Args:
        latents: (1, C, T, h, w), normalised as the transformer sees them.
        alarm: None for the usual one.
    Returns: the tile report.
    Raises: as `vae.decode.decode`. RunError memory_low.
    Memory: `plan.memory` on the device, whatever the length; see `OrderedFrames` for the host.
    """
    plan = plan_tiles(vae, "decode", latents)
    sink = OrderedFrames(lambda _item, _number, pixels: writer.write(pixels.unsqueeze(0)))
    try:
        watch = alarm or Alarm(vae.device)
        return decode(vae, denormalize(latents, variant), plan, sink, before_step=lambda _: watch.between_tiles())
    finally:
        sink.close()
