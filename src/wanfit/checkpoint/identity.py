"""What a checkpoint is, told from its header."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .companions import StoredTensor
from .expert import expert_of, version_in
from .names import Convention
from .recognise import shard_note, unsupported_variant
from .structure import Shape, first_dim, heads_of, transformer_tensors, umt5_tensors, vae_tensors
from .variants import TITLES, VARIANTS


@dataclass(frozen=True)
class Identity:
    """A model as its file describes it.

    Args:
        kind: transformer, vae or text_encoder.
        variant: key of `VARIANTS`, or vae-2.1, vae-2.2, umt5-xxl. Tiny models keep the variant their layout
            means.
        version_certain: False when nothing tells a Wan 2.1 T2V-14B from one expert of the 2.2 T2V-A14B.
        expert: high, low, unknown, or single for a model without experts.
        expert_source: file name, metadata, folder, or empty.
        dim: width; of the VAE the encoder's base width.
        in_channels, out_channels: of the transformer's latents; of the VAE pixel and latent channels.
        image_dim: width of the CLIP image embedding, 0 without one.
        text_dim: width of the text embedding that comes in, or that the text encoder gives.
        formats: key of `wanfit.quant.FORMATS` -> number of tensors.
        nbytes: of all tensors and their scales.
        parameters: elements of all tensors.
    """

    kind: str
    variant: str
    version_certain: bool
    expert: str
    expert_source: str
    dim: int
    num_heads: int
    ffn_dim: int
    num_layers: int
    in_channels: int
    out_channels: int
    image_dim: int
    text_dim: int
    formats: Mapping[str, int]
    nbytes: int
    parameters: int

    def describe(self) -> str:
        """One line for people."""
        parts = [TITLES[self.variant]]
        if self.expert in ("high", "low"):
            parts[0] += f", {self.expert}-noise expert (from the {self.expert_source})"
        elif self.expert == "unknown":
            parts[0] += ", high- or low-noise expert unknown"
        if not self.version_certain:
            parts[0] += " (or Wan 2.1 T2V-14B: the tensors are the same)"
        small = self.parameters < 1e8
        parts.append(f"{self.parameters / 1e6:.1f} M" if small else f"{self.parameters / 1e9:.2f} B")
        parts[-1] += " parameters"
        parts.append(" + ".join(f"{name} x{count}" for name, count in self.formats.items()))
        parts.append(f"{self.nbytes / 2**20:.1f} MiB" if self.nbytes < 2**27 else f"{self.nbytes / 2**30:.2f} GiB")
        return ", ".join(parts)

    def to_json(self) -> dict[str, object]:
        """All fields, as JSON values."""
        values: dict[str, object] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["formats"] = dict(self.formats)
        return values


def identify(
    path: Path, convention: Convention, tensors: Mapping[str, StoredTensor], metadata: Mapping[str, object]
) -> Identity:
    """Identity of the tensors (by canonical name), after checking that all of the model are there and fit.

    Raises:
        CheckpointError: tensors_missing, tensors_mismatch, model_unsupported.
    """
    shapes = {name: stored.shape for name, stored in tensors.items()}
    facts = {"transformer": _transformer, "vae": _vae, "text_encoder": _umt5}[convention.kind](path, convention, shapes)
    expert, source = "single", ""
    variant, certain = facts.variant, True
    if convention.kind == "transformer" and VARIANTS[variant].has_experts:
        expert, source = expert_of(path, metadata)
        if variant == "t2v-a14b":
            version = version_in(path)
            certain = bool(version) or expert != "unknown"
            if version == "2.1" and expert == "unknown":
                variant, expert = "t2v-14b", "single"
    return dataclasses.replace(
        facts,
        variant=variant,
        version_certain=certain,
        expert=expert,
        expert_source=source,
        formats=dict(Counter(t.format for t in tensors.values()).most_common()),
        nbytes=sum(t.nbytes for t in tensors.values()),
        parameters=sum(math.prod(shape) for shape in shapes.values()),
    )


def _transformer(path: Path, _: Convention, shapes: Mapping[str, Shape]) -> Identity:
    layers = _layer_count(path, shapes, "blocks")
    dims = _dims(
        path,
        shapes,
        {
            "dim": ("head.modulation", -1),
            "ffn_dim": ("blocks.0.ffn.0.weight", 0),
            "in_channels": ("patch_embedding.weight", 1),
            "head_rows": ("head.head.weight", 0),
            "text_dim": ("text_embedding.0.weight", 1),
            "freq_dim": ("time_embedding.0.weight", 1),
        },
    )
    out_channels, remainder = divmod(dims.pop("head_rows"), 4)
    heads = heads_of(dims["dim"])
    if not heads or remainder or not out_channels:
        raise unsupported_variant(path, "with an unknown layout", f"width {dims['dim']}, heads of 128 expected")
    image = any(name.startswith("img_emb.") for name in shapes)
    image_dim = _dims(path, shapes, {"image": ("img_emb.proj.0.weight", 0)})["image"] if image else 0
    positions = (first_dim(shapes, "img_emb.emb_pos", 1) or 0) if image else 0
    expected = transformer_tensors(
        **dims, num_layers=layers, out_channels=out_channels, image_dim=image_dim, image_positions=positions
    )
    _compare(path, shapes, expected)
    variant = _transformer_variant(path, dims["dim"], dims["in_channels"], out_channels, image, bool(positions))
    return _facts(
        "transformer",
        variant,
        dim=dims["dim"],
        num_heads=heads,
        ffn_dim=dims["ffn_dim"],
        num_layers=layers,
        in_channels=dims["in_channels"],
        out_channels=out_channels,
        image_dim=image_dim,
        text_dim=dims["text_dim"],
    )


def _transformer_variant(
    path: Path, dim: int, in_channels: int, out_channels: int, image: bool, positions: bool
) -> str:
    channels = (in_channels, out_channels)
    if channels == (36, 16):
        return "flf2v-14b" if positions else "i2v-14b" if image else "i2v-a14b"
    if channels == (16, 16) and not image:
        return "t2v-1.3b" if dim == 1536 else "t2v-a14b"
    if channels == (48, 48) and not image:
        return "ti2v-5b"
    title = "Fun-Control" if in_channels > 36 and out_channels == 16 else "with an unknown layout"
    raise unsupported_variant(path, title, f"{in_channels} channels in and {out_channels} out")


def _vae(path: Path, convention: Convention, shapes: Mapping[str, Shape]) -> Identity:
    dims = _dims(
        path,
        shapes,
        {
            "base_dim": ("encoder.conv1.weight", 0),
            "pixel_channels": ("encoder.conv1.weight", 1),
            "decoder_base_dim": ("decoder.head.0.gamma", 0),
            "latent_channels": ("decoder.conv1.weight", 1),
        },
    )
    _compare(path, shapes, vae_tensors(convention.variant, **dims))
    channels = (dims["pixel_channels"], dims["latent_channels"])
    expected = {"vae-2.1": (3, 16), "vae-2.2": (12, 48)}[convention.variant]
    if channels != expected:
        raise CheckpointError(
            "model_unsupported",
            "inspect",
            f"{path} is a VAE with {channels[0]} pixel and {channels[1]} latent channels; "
            f"the {TITLES[convention.variant]} has {expected[0]} and {expected[1]}",
            "Use wan_2.1_vae.safetensors or wan2.2_vae.safetensors",
        )
    return _facts("vae", convention.variant, dim=dims["base_dim"], in_channels=channels[0], out_channels=channels[1])


def _umt5(path: Path, _: Convention, shapes: Mapping[str, Shape]) -> Identity:
    layers = _layer_count(path, shapes, "encoder.block")
    layer = "encoder.block.0.layer"
    bias = "SelfAttention.relative_attention_bias.weight"
    if layers > 1 and f"{layer}.0.{bias}" in shapes and f"encoder.block.1.layer.0.{bias}" not in shapes:
        raise CheckpointError(
            "model_unknown",
            "inspect",
            f"{path} is a T5 encoder (as for Flux and SD3): only its first of {layers} layers has a position bias",
            "Wan needs UMT5-XXL, for example umt5_xxl_fp8_e4m3fn_scaled.safetensors",
        )
    dims = _dims(
        path,
        shapes,
        {
            "vocab": ("shared.weight", 0),
            "dim": ("shared.weight", 1),
            "inner_dim": (f"{layer}.0.SelfAttention.q.weight", 0),
            "ffn_dim": (f"{layer}.1.DenseReluDense.wi_0.weight", 0),
            "num_heads": (f"{layer}.0.{bias}", 1),
            "buckets": (f"{layer}.0.{bias}", 0),
        },
    )
    _compare(path, shapes, umt5_tensors(**dims, num_layers=layers))
    return _facts(
        "text_encoder",
        "umt5-xxl",
        dim=dims["dim"],
        num_heads=dims["num_heads"],
        ffn_dim=dims["ffn_dim"],
        num_layers=layers,
        text_dim=dims["dim"],
    )


def _facts(kind: str, variant: str, **numbers: int) -> Identity:
    zeros = dict.fromkeys(
        (
            "dim", "num_heads", "ffn_dim", "num_layers", "in_channels", "out_channels", "image_dim", "text_dim",
            "nbytes", "parameters",
        ),
        0,
    )  # fmt: skip
    return Identity(
        kind=kind,
        variant=variant,
        version_certain=True,
        expert="single",
        expert_source="",
        formats={},
        **(zeros | numbers),
    )


def _layer_count(path: Path, shapes: Mapping[str, Shape], blocks: str) -> int:
    prefix = blocks + "."
    found = {int(n.removeprefix(prefix).partition(".")[0]) for n in shapes if n.startswith(prefix)}
    missing = set(range(max(found, default=0) + 1)) - found
    if missing:
        raise _missing(path, len(missing), [f"{prefix}{i}.*" for i in sorted(missing)[:5]], "blocks")
    return len(found)


def _dims(path: Path, shapes: Mapping[str, Shape], wanted: Mapping[str, tuple[str, int]]) -> dict[str, int]:
    missing = sorted({name for name, _ in wanted.values()} - shapes.keys())
    if missing:
        raise _missing(path, len(missing), missing[:5], "tensors")
    dims: dict[str, int] = {}
    for key, (name, axis) in wanted.items():
        dim = first_dim(shapes, name, axis)
        if not dim:
            raise _mismatch(path, [f"{name} is {list(shapes[name])}"])
        dims[key] = dim
    return dims


def _compare(path: Path, shapes: Mapping[str, Shape], expected: Mapping[str, Shape]) -> None:
    missing = [name for name in expected if name not in shapes]
    if missing:
        raise _missing(path, len(missing), missing[:5], f"of {len(expected)} tensors")
    extra = sorted(shapes.keys() - expected.keys())
    if extra:
        raise _mismatch(path, [f"{name} does not belong to the model" for name in extra])
    wrong = [
        f"{name} is {list(shapes[name])} and should be {list(shape)}"
        for name, shape in expected.items()
        if shapes[name] != shape
    ]
    if wrong:
        raise _mismatch(path, wrong)


def _missing(path: Path, count: int, names: list[str], unit: str) -> CheckpointError:
    change = shard_note(path) or "Download the file again, or use another one"
    if names == ["patch_embedding.weight"] and path.suffix.lower() == ".gguf":
        change = (
            "This is a raw quantisation: llama-quantize drops the 5-D patch_embedding, and a fix step has to put it "
            "back. Use a finished file of the model, for example from QuantStack or city96"
        )
    return CheckpointError(
        "tensors_missing", "inspect", f"{path} lacks {count} {unit}, the first: {', '.join(names)}", change
    )


def _mismatch(path: Path, wrong: list[str]) -> CheckpointError:
    return CheckpointError(
        "tensors_mismatch",
        "inspect",
        f"{path}: {len(wrong)} tensors do not fit the model: {'; '.join(wrong[:5])}",
        "Use another file of the model",
    )
