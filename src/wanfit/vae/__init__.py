"""Exact tiled, streaming decode and encode of the Wan VAEs."""

from .config import VAE_VARIANTS, denormalize, diffusers_config, latent_statistics, normalize
from .decode import decode
from .encode import EncodedVideo, encode
from .passes import BeforeStep, Step, TileReport
from .plan import plan_decode, plan_encode
from .sinks import FrameSink, HostFrames, OrderedFrames, PixelFormat, Rect
from .tile_plan import Memory, TilePlan

__all__ = [
    "VAE_VARIANTS",
    "BeforeStep",
    "EncodedVideo",
    "FrameSink",
    "HostFrames",
    "Memory",
    "OrderedFrames",
    "PixelFormat",
    "Rect",
    "Step",
    "TilePlan",
    "TileReport",
    "decode",
    "denormalize",
    "diffusers_config",
    "encode",
    "latent_statistics",
    "normalize",
    "plan_decode",
    "plan_encode",
]
