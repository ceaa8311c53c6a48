"""What a Wan VAE is made of, read from its modules: the one description that planner and executor share.

A chain is a list of stages. A stage is a run of layers at one resolution and ends with the layer that changes
the resolution, if any. The description holds the modules themselves, so weights are always read where they
are at the time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import nn


@dataclass(frozen=True, eq=False)
class Conv:
    """A convolution. `kernel`, `stride`: (t, h, w). `pad`: zero rows and columns (left, right, top, bottom) in
    space that the model adds. Time is padded by history only. `planar`: a 2D convolution of single frames."""

    module: nn.Module
    inputs: int
    outputs: int
    kernel: tuple[int, int, int]
    stride: tuple[int, int, int]
    pad: tuple[int, int, int, int]
    planar: bool

    @property
    def elements(self) -> int:
        """Of its weight, the bias left out."""
        return self.inputs * self.outputs * math.prod(self.kernel)

    @property
    def history(self) -> int:
        """Frames of its input that it keeps between calls."""
        return self.kernel[0] - self.stride[0]


@dataclass(frozen=True, eq=False)
class Norm:
    """RMS norm over channels: x / |x| * scale * gamma."""

    module: Any
    channels: int


@dataclass(frozen=True, eq=False)
class Plain:
    """One convolution. With `norm`: norm and SiLU before it."""

    conv: Conv
    norm: Norm | None = None


@dataclass(frozen=True, eq=False)
class Residual:
    """norm, SiLU, conv, norm, SiLU, conv, plus the input."""

    norm1: Norm
    conv1: Conv
    norm2: Norm
    conv2: Conv
    shortcut: Conv | None


@dataclass(frozen=True, eq=False)
class Attention:
    """One head of attention over all pixels of a frame. Cannot be tiled."""

    norm: Norm
    qkv: Conv
    proj: Conv


@dataclass(frozen=True, eq=False)
class Upsample:
    """Doubles time (`time`, all frames but the first), then space by repetition, then `conv`."""

    conv: Conv
    time: Conv | None
    factor: int


@dataclass(frozen=True, eq=False)
class Downsample:
    """`conv` with a stride in space, then `time` with a stride in time (the first frame passes)."""

    conv: Conv
    time: Conv | None
    factor: int


@dataclass(frozen=True, eq=False)
class Shortcut:
    """The parameter-free path round a stage of VAE 2.2: repetition (up) or mean (down) of channel groups."""

    inputs: int
    outputs: int
    factor_t: int
    factor_s: int


Layer = Plain | Residual | Attention | Upsample | Downsample


@dataclass(frozen=True, eq=False)
class Stage:
    """Layers of one resolution, the change of resolution last; `shortcut` goes round all of them."""

    layers: tuple[Layer, ...]
    shortcut: Shortcut | None = None

    @property
    def up(self) -> Upsample | None:
        last = self.layers[-1]
        return last if isinstance(last, Upsample) else None

    @property
    def down(self) -> Downsample | None:
        last = self.layers[-1]
        return last if isinstance(last, Downsample) else None

    @property
    def inputs(self) -> int:
        """Channels of its input."""
        return convs_of(self.layers[0])[0].inputs

    @property
    def outputs(self) -> int:
        """Channels of its output."""
        last = self.layers[-1]
        if isinstance(last, Attention):
            return last.proj.outputs
        if isinstance(last, Residual):
            return last.conv2.outputs
        if isinstance(last, Downsample) and last.time:
            return last.time.outputs
        return last.conv.outputs

    @property
    def tileable(self) -> bool:
        return not any(isinstance(layer, Attention) for layer in self.layers)


@dataclass(frozen=True, eq=False)
class VaeModel:
    """Both halves of a VAE.

    Args:
        decoder: stage 0 is what runs on the whole frame (convolutions at latent resolution, middle block);
            then one stage per up block, the output convolution in the last.
        encoder: one stage per down block; the last is what runs on the whole frame.
        patch: pixels per side that one position of the outermost stage stands for (VAE 2.2: 2).
        latent_channels, channels: of the latent and of the video.
    """

    decoder: tuple[Stage, ...]
    encoder: tuple[Stage, ...]
    patch: int
    latent_channels: int
    channels: int

    def elements(self, direction: str) -> int:
        """Weights of the half that runs."""
        return self._decoder_elements if direction == "decode" else self._encoder_elements

    @cached_property
    def _decoder_elements(self) -> int:
        return _elements(self.decoder)

    @cached_property
    def _encoder_elements(self) -> int:
        return _elements(self.encoder)


def convs_of(layer: Layer) -> tuple[Conv, ...]:
    """The layer's convolutions, the first in the path first."""
    if isinstance(layer, Plain):
        return (layer.conv,)
    if isinstance(layer, Residual):
        return (layer.conv1, layer.conv2) + ((layer.shortcut,) if layer.shortcut else ())
    if isinstance(layer, Attention):
        return (layer.qkv, layer.proj)
    if isinstance(layer, Upsample):
        return ((layer.time,) if layer.time else ()) + (layer.conv,)
    return (layer.conv,) + ((layer.time,) if layer.time else ())


def norms_of(layer: Layer) -> tuple[Norm, ...]:
    if isinstance(layer, Residual):
        return (layer.norm1, layer.norm2)
    if isinstance(layer, Attention):
        return (layer.norm,)
    if isinstance(layer, Plain) and layer.norm:
        return (layer.norm,)
    return ()


def modules_of(stages: tuple[Stage, ...]) -> list[nn.Module]:
    """All modules with parameters that these stages use."""
    found: list[nn.Module] = []
    for stage in stages:
        for layer in stage.layers:
            found += [conv.module for conv in convs_of(layer)]
            found += [norm.module for norm in norms_of(layer)]
    return found


def _elements(stages: tuple[Stage, ...]) -> int:
    layers = [layer for stage in stages for layer in stage.layers]
    convs = [conv for layer in layers for conv in convs_of(layer)]
    norms = [norm for layer in layers for norm in norms_of(layer)]
    return sum(conv.elements + conv.outputs for conv in convs) + sum(norm.channels for norm in norms)
