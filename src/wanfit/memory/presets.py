"""Models by name, without files: sizes follow from the shapes and from how each kind of file stores them."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from ..checkpoint import VARIANTS
from ..checkpoint.gguf_types import FILE_TYPES, tensor_types
from ..checkpoint.structure import Shape, transformer_tensors, umt5_tensors, vae_tensors
from ..errors import InputError
from .parts import Tensor, TextPart, TransformerPart, VaePart, describe_transformer

_LARGE = {"dim": 5120, "ffn_dim": 13824, "num_layers": 40}
_SHAPES: Mapping[str, Mapping[str, int]] = {
    "i2v-a14b": _LARGE | {"in_channels": 36, "out_channels": 16},
    "t2v-a14b": _LARGE | {"in_channels": 16, "out_channels": 16},
    "ti2v-5b": {"dim": 3072, "ffn_dim": 14336, "num_layers": 30, "in_channels": 48, "out_channels": 48},
    "t2v-14b": _LARGE | {"in_channels": 16, "out_channels": 16},
    "t2v-1.3b": {"dim": 1536, "ffn_dim": 8960, "num_layers": 30, "in_channels": 16, "out_channels": 16},
    "i2v-14b": _LARGE | {"in_channels": 36, "out_channels": 16, "image_dim": 1280},
    "flf2v-14b": _LARGE | {"in_channels": 36, "out_channels": 16, "image_dim": 1280, "image_positions": 514},
}
_PLAIN = {"fp16": "f16", "bf16": "bf16", "fp32": "f32"}
_FLOAT8 = ("fp8", "fp8_kj")
_BLOCKS: Mapping[str, tuple[int, int]] = {
    "f32": (1, 4), "f16": (1, 2), "bf16": (1, 2), "f8_e4m3": (1, 1), "q8_0": (32, 34), "q6_k": (256, 210),
    "q5_k": (256, 176), "q5_1": (32, 24), "q5_0": (32, 22), "q4_k": (256, 144), "q4_1": (32, 20), "q4_0": (32, 18),
    "q3_k": (256, 110), "q2_k": (256, 84), "iq4_nl": (32, 18), "iq4_xs": (256, 136),
}  # fmt: skip
"""Elements and bytes of one block of each format."""


def file_types() -> list[str]:
    """The second half of a preset's name."""
    return [*_PLAIN, *_FLOAT8, *(name.lower() for name in FILE_TYPES if name not in ("BF16", "F16"))]


@functools.lru_cache(maxsize=32)
def transformer_preset(name: str) -> TransformerPart:
    """A transformer by `variant:type`: `i2v-a14b:fp8` (Comfy's scaled fp8), `t2v-a14b:q4_k_m`, `ti2v-5b:fp16` ...

    Raises:
        InputError: number_invalid: no such variant or type; lists the known ones.
    """
    variant, _, kind = name.lower().partition(":")
    if variant not in _SHAPES:
        raise InputError(
            "number_invalid",
            "input",
            f"<model> is {name!r}, which is neither a file nor a known model",
            f"Use one of: {', '.join(_SHAPES)}; with a type, such as i2v-a14b:fp8",
        )
    if kind not in file_types():
        raise InputError(
            "number_invalid",
            "input",
            f"<model> is {name!r}; the type behind the colon is not known",
            f"Use one of: {', '.join(file_types())}",
        )
    sizes = _SHAPES[variant]
    shapes = transformer_tensors(**{"text_dim": 4096, "freq_dim": 256, **sizes})
    formats = _formats(shapes, kind)
    tensors = {key: _stored(shape, formats[key]) for key, shape in shapes.items()}
    return describe_transformer(f"{variant}:{kind}", variant, tensors, sizes["dim"] // 128, sizes["out_channels"])


@functools.lru_cache(maxsize=8)
def text_preset(kind: str = "fp8") -> TextPart:
    """UMT5-XXL: `fp8` (Comfy's scaled fp8), `fp16` or `bf16`."""
    shapes = umt5_tensors(
        vocab=256384, dim=4096, inner_dim=4096, ffn_dim=10240, num_heads=64, num_layers=24, buckets=32
    )
    key = {"fp8": "f8_e4m3", "fp16": "f16", "bf16": "bf16"}[kind]
    linears = {name for name in shapes if name.startswith("encoder.block.") and name.endswith(("q.weight", "k.weight",
               "v.weight", "o.weight", "wi_0.weight", "wi_1.weight", "wo.weight"))}  # fmt: skip
    sizes = {name: _stored(shape, key if name in linears else "f16").nbytes for name, shape in shapes.items()}
    return TextPart(f"umt5-xxl:{kind}", 4096, 10240, 64, sum(sizes.values()), max(sizes[name] for name in linears))


@functools.lru_cache(maxsize=8)
def vae_preset(variant: str) -> VaePart:
    """`vae-2.1` or `vae-2.2` in 16 bit."""
    widths, latent, pixel = ((96, 96), 16, 3) if variant == "vae-2.1" else ((160, 256), 48, 12)
    shapes = vae_tensors(
        variant, base_dim=widths[0], decoder_base_dim=widths[1], latent_channels=latent, pixel_channels=pixel
    )
    return VaePart(variant, variant, *widths, 2 * sum(math.prod(shape) for shape in shapes.values()))


def parts_of(name: str) -> tuple[list[TransformerPart], TextPart, VaePart]:
    """All parts of a preset: both experts where the model has two, scaled fp8 text encoder, its VAE."""
    transformer = transformer_preset(name)
    variant = VARIANTS[transformer.variant]
    return [transformer] * (2 if variant.has_experts else 1), text_preset(), vae_preset(variant.vae)


def _formats(shapes: Mapping[str, Shape], kind: str) -> dict[str, str]:
    if kind in _PLAIN:
        return dict.fromkeys(shapes, _PLAIN[kind])
    if kind in _FLOAT8:
        plain, only_blocks = ("f16", False) if kind == "fp8" else ("f32", True)
        return {
            name: "f8_e4m3"
            if len(shape) == 2 and name.endswith(".weight") and (name.startswith("blocks.") or not only_blocks)
            else plain
            for name, shape in shapes.items()
        }
    return {name: type_name.lower() for name, type_name in tensor_types(shapes, kind.upper()).items()}


def _stored(shape: Shape, key: str) -> Tensor:
    elements, nbytes = _BLOCKS[key]
    return Tensor(shape, key, math.prod(shape) // elements * nbytes)
