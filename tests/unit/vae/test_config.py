"""Configs, statistics, descriptions and the cuDNN trap."""

from __future__ import annotations

import inspect

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import nn

from wanfit.errors import CheckpointError, InputError
from wanfit.vae import denormalize, diffusers_config, latent_statistics, normalize
from wanfit.vae.adapters import describe
from wanfit.vae.conv3d import conv3d_trap


@pytest.mark.parametrize("variant,parameters", [("vae-2.1", 126_892_531), ("vae-2.2", 704_688_668)])
def test_real_sizes(variant: str, parameters: int) -> None:
    with torch.device("meta"):
        vae = AutoencoderKLWan(**diffusers_config(variant))
    assert sum(p.numel() for p in vae.parameters()) == parameters
    model = describe(vae)
    assert (model.latent_channels, model.channels) == (vae.config.z_dim, 3)
    assert len(model.decoder) == 5
    used = {id(p) for stage in (*model.decoder, *model.encoder) for p in _parameters(stage)}
    assert used == {id(p) for p in vae.parameters()}


def _parameters(stage: object) -> list[nn.Parameter]:
    from wanfit.vae.layers import Stage, modules_of

    assert isinstance(stage, Stage)
    return [p for module in modules_of((stage,)) for p in module.parameters()]


def test_statistics_of_2_1_are_those_of_diffusers() -> None:
    defaults = inspect.signature(AutoencoderKLWan.__init__).parameters
    assert latent_statistics("vae-2.1") == (
        tuple(defaults["latents_mean"].default),
        tuple(defaults["latents_std"].default),
    )


@pytest.mark.parametrize("variant", ["vae-2.1", "vae-2.2"])
def test_normalisation(variant: str) -> None:
    mean, std = latent_statistics(variant)
    latents = torch.randn(2, len(mean), 1, 2, 3)
    raw = denormalize(latents, variant)
    assert raw[1, 5, 0, 1, 2].item() == pytest.approx(latents[1, 5, 0, 1, 2].item() * std[5] + mean[5], abs=1e-6)
    assert torch.allclose(normalize(raw, variant), latents, atol=1e-5)


def test_refused() -> None:
    with pytest.raises(InputError, match="latent_invalid"):
        denormalize(torch.zeros(1, 16, 1, 2, 2), "vae-2.2")
    with pytest.raises(InputError, match=r"number_invalid.*vae-3"):
        diffusers_config("vae-3")
    with pytest.raises(CheckpointError, match=r"model_unsupported.*Linear"):
        describe(nn.Linear(1, 1))
    with torch.device("meta"):
        tiled_attention = AutoencoderKLWan(base_dim=8, attn_scales=[1.0])
    with pytest.raises(CheckpointError, match=r"model_unsupported.*attention outside"):
        describe(tiled_attention)


@pytest.mark.parametrize(
    "torch_version,cudnn,trapped",
    [
        ("2.8.0+cu128", 91002, False),
        ("2.9.0+cu128", 91002, True),
        ("2.9.0", 91501, True),
        ("2.9.1+cu130", 91300, True),
        ("2.9.1+cu130", 91501, False),
        ("2.10.0", 91002, True),
        ("2.11.0+cu130", 91701, False),
        ("2.9.0+cpu", None, False),
        ("2.9.1", 90701, False),
    ],
)
def test_conv3d_trap(torch_version: str, cudnn: int | None, trapped: bool) -> None:
    reason = conv3d_trap(torch_version, cudnn)
    assert bool(reason) == trapped
    if trapped:
        assert torch_version in reason and str(cudnn) in reason
