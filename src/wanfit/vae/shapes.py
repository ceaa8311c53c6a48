"""A Wan VAE described by the names and shapes of its tensors, without modules: what a plan needs, without diffusers.

Names are the original Wan repository's, as `checkpoint.structure.vae_tensors` lists them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..checkpoint.structure import Shape
from .layers import Attention, Conv, Downsample, Layer, Norm, Plain, Residual, Shortcut, Stage, Upsample, VaeModel
from .stages import assemble, split

_NOWHERE = nn.Identity()


def describe_tensors(tensors: Mapping[str, Shape]) -> VaeModel:
    """As `adapters.describe` of a VAE of these tensors; it can be planned with, not run."""
    return _Reader(tensors).model()


class _Reader:
    def __init__(self, tensors: Mapping[str, Shape]) -> None:
        self._tensors = tensors
        self._nested = "decoder.upsamples.0.upsamples.0.residual.2.weight" in tensors

    def model(self) -> VaeModel:
        if self._nested:
            ups, downs = (
                self._groups("decoder.upsamples", "upsamples"),
                self._groups("encoder.downsamples", "downsamples"),
            )
        else:
            ups, downs = split(self._layers("decoder.upsamples")), split(self._layers("encoder.downsamples"))
        trunk = [Plain(self._conv("conv2")), Plain(self._conv("decoder.conv1")), *self._layers("decoder.middle")]
        tail = [*self._layers("encoder.middle"), self._head("encoder.head"), Plain(self._conv("conv1"))]
        first = Plain(self._conv("encoder.conv1"))
        return assemble(trunk, ups, self._head("decoder.head"), first, downs, tail, 2 if self._nested else 1)

    def _groups(self, name: str, inner: str) -> list[Stage]:
        """Of VAE 2.2: a shortcut round each stage that changes the resolution, and in the encoder round the last."""
        stages: list[Stage] = []
        for index in range(self._count(name)):
            stage = Stage(tuple(self._layers(f"{name}.{index}.{inner}")))
            change = stage.up or stage.down
            around = None
            if change or inner == "downsamples":
                time, space = (2 if change and change.time else 1), (2 if change else 1)
                around = Shortcut(stage.inputs, stage.outputs, time, space)
            stages.append(Stage(stage.layers, around))
        return stages

    def _layers(self, name: str) -> list[Layer]:
        return [self._layer(f"{name}.{index}", up="upsamples" in name) for index in range(self._count(name))]

    def _count(self, name: str) -> int:
        return 1 + max(int(key[len(name) + 1 :].split(".")[0]) for key in self._tensors if key.startswith(f"{name}."))

    def _layer(self, name: str, *, up: bool) -> Layer:
        if f"{name}.to_qkv.weight" in self._tensors:
            return Attention(self._norm(f"{name}.norm"), self._conv(f"{name}.to_qkv"), self._conv(f"{name}.proj"))
        if f"{name}.residual.2.weight" in self._tensors:
            around = self._conv(f"{name}.shortcut") if f"{name}.shortcut.weight" in self._tensors else None
            norms = [self._norm(f"{name}.residual.{index}") for index in (0, 3)]
            convs = [self._conv(f"{name}.residual.{index}") for index in (2, 6)]
            return Residual(norms[0], convs[0], norms[1], convs[1], around)
        has_time = f"{name}.time_conv.weight" in self._tensors
        if up:
            time = self._conv(f"{name}.time_conv") if has_time else None
            return Upsample(self._conv(f"{name}.resample.1"), time, 2)
        time = self._conv(f"{name}.time_conv", stride=(2, 1, 1)) if has_time else None
        return Downsample(self._conv(f"{name}.resample.1", stride=(1, 2, 2), pad=(0, 1, 0, 1)), time, 2)

    def _head(self, name: str) -> Plain:
        return Plain(self._conv(f"{name}.2"), self._norm(f"{name}.0"))

    def _norm(self, name: str) -> Norm:
        return Norm(None, self._tensors[f"{name}.gamma"][0])

    def _conv(
        self,
        name: str,
        stride: tuple[int, int, int] = (1, 1, 1),
        pad: tuple[int, int, int, int] | None = None,
    ) -> Conv:
        outputs, inputs, *kernel = self._tensors[f"{name}.weight"]
        planar = len(kernel) == 2
        depth, height, width = (1, *kernel) if planar else kernel
        around = ((width - 1) // 2, (width - 1) // 2, (height - 1) // 2, (height - 1) // 2)
        return Conv(_NOWHERE, inputs, outputs, (depth, height, width), stride, pad or around, planar)
