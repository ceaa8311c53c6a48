"""What a plan needs to know of a model's parts: sizes from a header, no weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..blocks import BlockShape
from ..checkpoint import VARIANTS, Checkpoint, TensorInfo, Variant
from ..checkpoint.structure import vae_tensors
from ..vae.layers import VaeModel
from ..vae.shapes import describe_tensors

ALIGNMENT = 256
"""Of each tensor in a device slot, see `offload.layout`."""

_WIDE = ("time_embedding.", "head.modulation")
"""Outside the blocks: what the host keeps in float32."""

SCALED = ("f8_e4m3", "f8_e5m2", "int8", "mxfp8", "nvfp4")


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file: shape, format key, stored bytes without scales."""

    shape: tuple[int, ...]
    format: str
    nbytes: int


@dataclass(frozen=True)
class TransformerPart:
    """One transformer.

    Args:
        name: of the file or preset, for people.
        block_bytes: the largest block as it lies in a device slot.
        rest_elements, rest_wide: elements outside the blocks, and those of them kept in float32.
        rest_largest: stored bytes of the largest tensor outside the blocks.
        nbytes: of all tensors as stored.
        formats: of the blocks' matrices.
    """

    name: str
    variant: str
    dim: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    in_channels: int
    out_channels: int
    image_dim: int
    block_bytes: int
    rest_elements: int
    rest_wide: int
    rest_largest: int
    nbytes: int
    formats: frozenset[str]

    @property
    def shape(self) -> BlockShape:
        return BlockShape(self.dim, self.num_heads, self.ffn_dim, image_tokens=257 if self.image_dim else 0)

    def rest_bytes(self, dtype: torch.dtype) -> int:
        """Of the weights outside the blocks, once they are loaded."""
        return (self.rest_elements - self.rest_wide) * dtype.itemsize + self.rest_wide * 4


@dataclass(frozen=True)
class TextPart:
    """The text encoder. `largest`: stored bytes of its largest linear."""

    name: str
    dim: int
    ffn_dim: int
    num_heads: int
    nbytes: int
    largest: int


@dataclass(frozen=True)
class VaePart:
    """The VAE; widths tell tiny ones from real ones."""

    name: str
    variant: str
    base_dim: int
    decoder_base_dim: int
    nbytes: int

    @property
    def latent_channels(self) -> int:
        return 16 if self.variant == "vae-2.1" else 48

    @property
    def elements(self) -> int:
        """Weights of both halves."""
        return self.description.elements("decode") + self.description.elements("encode")

    @property
    def description(self) -> VaeModel:
        """For the VAE's plans."""
        return _described(self.variant, self.base_dim, self.decoder_base_dim, self.latent_channels)


@dataclass(frozen=True)
class Model:
    """The parts of one model: one or two transformers in the order in which they run."""

    transformers: tuple[TransformerPart, ...]
    text_encoder: TextPart
    vae: VaePart

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.transformers[0].variant]

    @property
    def slot_bytes(self) -> int:
        """Of a device slot: the largest block of any expert."""
        return max(part.block_bytes for part in self.transformers)


@functools.lru_cache(maxsize=8)
def _described(variant: str, base_dim: int, decoder_base_dim: int, latent_channels: int) -> VaeModel:
    shapes = vae_tensors(
        variant,
        base_dim=base_dim,
        decoder_base_dim=decoder_base_dim,
        latent_channels=latent_channels,
        pixel_channels=3 if variant == "vae-2.1" else 12,
    )
    return describe_tensors(shapes)


def transformer_part(checkpoint: Checkpoint, held: Mapping[str, TensorInfo] | None = None) -> TransformerPart:
    """Of an open transformer checkpoint. `held`: the tensors as they will be, where that is not as they are stored."""
    identity = checkpoint.identity
    tensors = {name: _tensor(info) for name, info in (held or checkpoint.tensors).items()}
    return describe_transformer(
        checkpoint.path.name, identity.variant, tensors, identity.num_heads, identity.out_channels
    )


def describe_transformer(
    name: str, variant: str, tensors: Mapping[str, Tensor], num_heads: int, out_channels: int
) -> TransformerPart:
    """From all tensors of a transformer by canonical name."""
    blocks: dict[str, int] = {}
    formats: set[str] = set()
    rest = wide = largest = 0
    for key, tensor in tensors.items():
        elements = math.prod(tensor.shape)
        if key.startswith("blocks."):
            index = key.split(".", 2)[1]
            blocks[index] = blocks.get(index, 0) + _in_slot(tensor)
            if len(tensor.shape) == 2:
                formats.add(tensor.format)
            continue
        rest += elements
        largest = max(largest, tensor.nbytes)
        wide += elements if key.startswith(_WIDE) else 0
    image = tensors.get("img_emb.proj.0.weight")
    return TransformerPart(
        name=name,
        variant=variant,
        dim=tensors["head.modulation"].shape[-1],
        num_heads=num_heads,
        ffn_dim=tensors["blocks.0.ffn.0.weight"].shape[0],
        num_layers=len(blocks),
        in_channels=tensors["patch_embedding.weight"].shape[1],
        out_channels=out_channels,
        image_dim=image.shape[0] if image else 0,
        block_bytes=max(blocks.values()),
        rest_elements=rest,
        rest_wide=wide,
        rest_largest=largest,
        nbytes=sum(tensor.nbytes for tensor in tensors.values()),
        formats=frozenset(formats),
    )


def text_part(checkpoint: Checkpoint) -> TextPart:
    """Of an open UMT5 checkpoint."""
    identity = checkpoint.identity
    linears = [info.nbytes for name, info in checkpoint.tensors.items() if name.startswith("encoder.block.")]
    return TextPart(
        checkpoint.path.name, identity.dim, identity.ffn_dim, identity.num_heads, checkpoint.nbytes, max(linears)
    )


def vae_part(checkpoint: Checkpoint) -> VaePart:
    """Of an open VAE checkpoint."""
    return VaePart(
        checkpoint.path.name,
        checkpoint.identity.variant,
        checkpoint.tensors["encoder.conv1.weight"].shape[0],
        checkpoint.tensors["decoder.head.0.gamma"].shape[0],
        checkpoint.nbytes,
    )


def _tensor(info: TensorInfo) -> Tensor:
    return Tensor(info.shape, info.format, info.nbytes)


def _in_slot(tensor: Tensor) -> int:
    """Bytes in a slot, with two scales where the format has scales (per-row ones are small beside the matrix)."""
    scales = 2 * ALIGNMENT if tensor.format in SCALED and len(tensor.shape) == 2 else 0
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT + scales
