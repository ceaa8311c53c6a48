"""Reads the description of a Wan VAE out of its modules: diffusers' `AutoencoderKLWan`, ComfyUI's `WanVAE`.

Modules are told apart by what they hold, never by class, so nothing of ComfyUI is imported. Every size,
padding and stride is taken from the modules.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from .layers import (
    Attention,
    Conv,
    Downsample,
    Layer,
    Norm,
    Plain,
    Residual,
    Shortcut,
    Stage,
    Upsample,
    VaeModel,
)
from .stages import assemble, split, unsupported


def describe(vae: Any) -> VaeModel:
    """The stages of `vae`. Modules on the meta device will do; a description is its own.

    Raises: CheckpointError model_unsupported: no Wan VAE, or one with layers that have no exact tiling.
    """
    if isinstance(vae, VaeModel):
        return vae
    if hasattr(vae, "post_quant_conv") and hasattr(vae, "quant_conv"):
        return _from_diffusers(vae)
    if hasattr(vae, "conv1") and hasattr(vae, "conv2") and hasattr(vae, "decoder"):
        return _from_comfyui(vae)
    raise unsupported(f"<vae> is a {type(vae).__name__}, which is neither AutoencoderKLWan nor WanVAE")


def _from_diffusers(vae: Any) -> VaeModel:
    decoder, encoder = vae.decoder, vae.encoder
    trunk = [
        Plain(_conv(vae.post_quant_conv)),
        Plain(_conv(decoder.conv_in)),
        *_middle(decoder.mid_block),
    ]
    ups: list[Stage] = []
    for block in decoder.up_blocks:
        upsampler = getattr(block, "upsampler", None)
        if upsampler is None and getattr(block, "upsamplers", None) is not None:
            upsampler = block.upsamplers[0]
        modules = [*block.resnets] + ([upsampler] if upsampler is not None else [])
        ups.append(_stage(modules, getattr(block, "avg_shortcut", None)))
    head = Plain(_conv(decoder.conv_out), _norm(decoder.norm_out))

    downs: list[Stage] = []
    if hasattr(encoder.down_blocks[0], "avg_shortcut"):
        for block in encoder.down_blocks:
            modules = [*block.resnets] + ([block.downsampler] if block.downsampler is not None else [])
            downs.append(_stage(modules, block.avg_shortcut))
    else:
        downs = split(map(_layer, encoder.down_blocks))
    tail = [
        *_middle(encoder.mid_block),
        Plain(_conv(encoder.conv_out), _norm(encoder.norm_out)),
        Plain(_conv(vae.quant_conv)),
    ]
    patch = vae.config.patch_size or 1
    return assemble(trunk, ups, head, Plain(_conv(encoder.conv_in)), downs, tail, patch)


def _from_comfyui(vae: Any) -> VaeModel:
    decoder, encoder = vae.decoder, vae.encoder
    grouped = hasattr(decoder.upsamples[0], "upsamples")  # VAE 2.2; its decode has the patch of 2 built in
    if grouped:
        ups = [_stage(block.upsamples, block.avg_shortcut) for block in decoder.upsamples]
        downs = [_stage(block.downsamples, block.avg_shortcut) for block in encoder.downsamples]
    else:
        ups, downs = split(map(_layer, decoder.upsamples)), split(map(_layer, encoder.downsamples))
    trunk = [Plain(_conv(vae.conv2)), Plain(_conv(decoder.conv1)), *map(_layer, decoder.middle)]
    head = Plain(_conv(decoder.head[-1]), _norm(decoder.head[0]))
    tail = [
        *map(_layer, encoder.middle),
        Plain(_conv(encoder.head[-1]), _norm(encoder.head[0])),
        Plain(_conv(vae.conv1)),
    ]
    return assemble(trunk, ups, head, Plain(_conv(encoder.conv1)), downs, tail, 2 if grouped else 1)


def _stage(modules: Iterable[Any], shortcut: Any) -> Stage:
    around = None
    if shortcut is not None:
        around = Shortcut(shortcut.in_channels, shortcut.out_channels, shortcut.factor_t, shortcut.factor_s)
    return Stage(tuple(_layer(module) for module in modules), around)


def _middle(block: Any) -> list[Layer]:
    layers: list[Layer] = [_layer(block.resnets[0])]
    for attention, resnet in zip(block.attentions, block.resnets[1:], strict=True):
        if attention is not None:
            layers.append(_layer(attention))
        layers.append(_layer(resnet))
    return layers


def _layer(module: Any) -> Layer:
    if hasattr(module, "to_qkv"):
        return Attention(_norm(module.norm), _conv(module.to_qkv), _conv(module.proj))
    if hasattr(module, "mode") and hasattr(module, "resample"):
        return _resample(module)
    if hasattr(module, "conv_shortcut"):
        if not isinstance(module.nonlinearity, nn.SiLU):
            raise unsupported(f"<vae> uses {type(module.nonlinearity).__name__} instead of SiLU")
        parts = (module.norm1, module.conv1, module.norm2, module.conv2, module.conv_shortcut)
    elif hasattr(module, "residual") and hasattr(module, "shortcut"):
        inner = module.residual
        parts = (inner[0], inner[2], inner[3], inner[6], module.shortcut)
    else:
        raise unsupported(f"<vae> holds a {type(module).__name__}")
    norm1, conv1, norm2, conv2, shortcut = parts
    around = None if isinstance(shortcut, nn.Identity) else _conv(shortcut)
    return Residual(_norm(norm1), _conv(conv1), _norm(norm2), _conv(conv2), around)


def _resample(module: Any) -> Layer:
    time = _conv(module.time_conv) if hasattr(module, "time_conv") else None
    before, conv = module.resample[0], module.resample[1]
    if module.mode.startswith("upsample"):
        factors = {int(factor) for factor in before.scale_factor}
        if before.mode != "nearest-exact" or len(factors) != 1:
            raise unsupported(f"<vae> upsamples by {before.scale_factor} with {before.mode}")
        return Upsample(_conv(conv), time, factors.pop())
    return Downsample(_conv(conv, pad=tuple(before.padding)), time, conv.stride[0])


def _conv(module: Any, pad: tuple[int, ...] | None = None) -> Conv:
    planar = len(module.kernel_size) == 2
    if pad is None:
        declared = getattr(module, "_padding", None)
        if isinstance(declared, tuple):  # (left, right, top, bottom, before, after), added by the module itself
            pad = declared[:4]
        else:
            height, width = module.padding[-2:]
            pad = (width, width, height, height)
    kernel = (1, *module.kernel_size) if planar else tuple(module.kernel_size)
    stride = (1, *module.stride) if planar else tuple(module.stride)
    left, right, top, bottom = pad
    return Conv(
        module,
        module.in_channels,
        module.out_channels,
        (kernel[0], kernel[1], kernel[2]),
        (stride[0], stride[1], stride[2]),
        (left, right, top, bottom),
        planar,
    )


def _norm(module: Any) -> Norm:
    if isinstance(module.bias, nn.Parameter):
        raise unsupported("<vae> has norms with a bias")
    return Norm(module, module.gamma.shape[0])
