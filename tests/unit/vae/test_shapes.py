"""A VAE described by its tensors alone is the one that diffusers builds."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan

from wanfit.checkpoint.structure import vae_tensors
from wanfit.vae import diffusers_config, plan_decode, plan_encode
from wanfit.vae.adapters import describe
from wanfit.vae.shapes import describe_tensors

WIDTHS = {"vae-2.1": (16, 3), "vae-2.2": (48, 12)}


def without_modules(part: Any) -> Any:
    if isinstance(part, tuple):
        return tuple(map(without_modules, part))
    if not dataclasses.is_dataclass(part):
        return part
    fields = [field.name for field in dataclasses.fields(part) if field.name != "module"]
    return type(part).__name__, *((name, without_modules(getattr(part, name))) for name in fields)


@pytest.mark.parametrize("variant", WIDTHS)
@pytest.mark.parametrize("widths", [(None, None), (32, 48)])
def test_the_same_stages_weights_and_plans(variant: str, widths: tuple[int | None, int | None]) -> None:
    config = diffusers_config(variant)
    base, decoder = (
        given or config.get(name) for given, name in zip(widths, ("base_dim", "decoder_base_dim"), strict=True)
    )
    config |= {"base_dim": base, "decoder_base_dim": decoder}
    with torch.device("meta"):
        vae = AutoencoderKLWan(**config)
    latent, pixel = WIDTHS[variant]
    found = describe_tensors(
        vae_tensors(
            variant, base_dim=base, decoder_base_dim=decoder or base, latent_channels=latent, pixel_channels=pixel
        )
    )
    assert without_modules(found) == without_modules(describe(vae))
    assert found.elements("decode") + found.elements("encode") == sum(p.numel() for p in vae.parameters())
    options = {"dtype": torch.bfloat16, "device": "cuda", "budget_bytes": 2**31}
    assert plan_decode(found, (1, latent, 21, 60, 104), **options) == plan_decode(
        vae, (1, latent, 21, 60, 104), **options
    )
    assert plan_encode(found, (1, 3, 81, 480, 832), **options) == plan_encode(vae, (1, 3, 81, 480, 832), **options)
