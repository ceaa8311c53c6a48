"""The models WanFit runs, with the defaults of their official repositories.

Source: wan/configs of Wan-Video/Wan2.2 and generate.py of Wan-Video/Wan2.1, Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

_LANDSCAPE_AND_PORTRAIT = ((1280, 720), (720, 1280), (832, 480), (480, 832))


@dataclass(frozen=True)
class Variant:
    """One model and its defaults.

    Args:
        shift: of the flow schedule.
        boundary_ratio: share of the schedule's 1000 steps from which on the high-noise expert works; None for
            a model without experts.
        guidance_scale: of the only or the HIGH-noise expert (diffusers' order; the official repository's
            tuples are the other way round).
        guidance_scale_2: of the low-noise expert.
        size_multiple: what width and height must be a multiple of.
        sizes: (width, height) the model was trained for; the first is the default.
        vae, text_encoder: variants of the files that belong to it.
        takes_image, needs_image: whether an image can, and must, be given.
    """

    title: str
    steps: int
    shift: float
    boundary_ratio: float | None
    guidance_scale: float
    guidance_scale_2: float | None
    num_frames: int = 81
    fps: int = 16
    size_multiple: int = 16
    sizes: tuple[tuple[int, int], ...] = _LANDSCAPE_AND_PORTRAIT
    vae: str = "vae-2.1"
    text_encoder: str = "umt5-xxl"
    takes_image: bool = False
    needs_image: bool = False
    expand_timesteps: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether the model is a pair of a high-noise and a low-noise transformer."""
        return self.boundary_ratio is not None


VARIANTS: Mapping[str, Variant] = MappingProxyType(
    {
        "t2v-a14b": Variant("Wan 2.2 T2V-A14B", 40, 12.0, 0.875, 4.0, 3.0),
        "i2v-a14b": Variant("Wan 2.2 I2V-A14B", 40, 5.0, 0.9, 3.5, 3.5, takes_image=True, needs_image=True),
        "ti2v-5b": Variant(
            "Wan 2.2 TI2V-5B",
            50,
            5.0,
            None,
            5.0,
            None,
            num_frames=121,
            fps=24,
            size_multiple=32,
            sizes=((1280, 704), (704, 1280)),
            vae="vae-2.2",
            takes_image=True,
            expand_timesteps=True,
        ),
        "t2v-14b": Variant("Wan 2.1 T2V-14B", 50, 5.0, None, 5.0, None),
        "t2v-1.3b": Variant("Wan 2.1 T2V-1.3B", 50, 5.0, None, 5.0, None, sizes=((832, 480), (480, 832))),
        "i2v-14b": Variant("Wan 2.1 I2V-14B", 40, 5.0, None, 5.0, None, takes_image=True, needs_image=True),
        "flf2v-14b": Variant("Wan 2.1 FLF2V-14B", 50, 16.0, None, 5.0, None, takes_image=True, needs_image=True),
    }
)

TITLES: Mapping[str, str] = MappingProxyType(
    {name: variant.title for name, variant in VARIANTS.items()}
    | {"vae-2.1": "Wan 2.1 VAE", "vae-2.2": "Wan 2.2 VAE", "umt5-xxl": "UMT5-XXL text encoder"}
)

FILES: Mapping[str, str] = MappingProxyType(
    {
        "vae-2.1": "wan_2.1_vae.safetensors",
        "vae-2.2": "wan2.2_vae.safetensors",
        "umt5-xxl": "umt5_xxl_fp8_e4m3fn_scaled.safetensors",
    }
)
"""What the community calls the file of a part, for messages."""
