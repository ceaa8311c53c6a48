"""Which model a file holds, from its tensor names; and a reasoned no for every other."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import CheckpointError
from .companions import EXTRAS, ROLES
from .names import Convention, conventions

PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.", "first_stage_model.", "vae.", "")
# In an all-in-one checkpoint the other components are somebody else's.
_OTHER_COMPONENTS = (
    "first_stage_model.",
    "vae.",
    "text_encoders.",
    "text_encoder.",
    "cond_stage_model.",
    "conditioner.",
    "clip_vision.",
)
_LORA = re.compile(r"(^|\.)lora_(unet|te\d?|down|up|A|B)[._]|\.(diff|diff_b|diff_m|dora_scale|lokr_w\d|hada_w\d_\w)$")
_WAN_VARIANTS = (
    (r"vace_", "VACE (video editing and control)"),
    (r"control_adapter\.", "Fun-Camera (camera control)"),
    (r"casual_audio_encoder\.|audio_injector\.|trainable_cond_mask", "S2V (speech to video)"),
    (r"face_adapter\.|motion_encoder\.|face_encoder\.|pose_patch_embedding\.", "Animate"),
    (r"audio_proj\.|blocks\.\d+\.audio_cross_attn", "HuMo or another audio model"),
    (r"ref_conv\.", "Fun-Control"),
)
_FAMILIES = (
    (r"double_blocks\.\d+\.img_attn", "Flux or HunyuanVideo"),
    (r"(model\.diffusion_model\.)?(input_blocks|output_blocks)\.\d+\.", "Stable Diffusion (SD 1.5 or SDXL)"),
    (r"(model\.diffusion_model\.)?joint_blocks\.\d+\.", "Stable Diffusion 3"),
    (r"(.*\.)?transformer_blocks\.\d+\.img_mod", "Qwen-Image"),
    (r"(.*\.)?patchify_proj\.|(.*\.)?adaln_single\.", "LTX-Video"),
    (r"(.*\.)?transformer_blocks\.\d+\.", "another diffusion transformer (Flux, CogVideoX, LTX ...)"),
    (r"(down|up)_blocks\.\d+\.attentions\.", "a Stable Diffusion UNet"),
    (r"(.*\.)?vision_model\.|visual\.transformer\.", "a CLIP vision model"),
    (r"(.*\.)?text_model\.encoder\.", "a CLIP text encoder"),
    (r"model\.layers\.\d+\.|blk\.\d+\.attn_q\.", "a language model"),
    (r"(encoder|decoder)\.(down|up)(_blocks)?\.\d+\.|(encoder|decoder)\.mid", "a VAE of another model"),
)
_SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")


@dataclass(frozen=True)
class Recognised:
    """A model by its names: `canonical` maps each stored name of the model to its canonical one."""

    convention: Convention
    prefix: str
    canonical: Mapping[str, str]


def recognise(path: Path, names: Collection[str], architecture: object) -> Recognised:
    """Find the naming convention and prefix that fit.

    Args:
        path: for messages.
        names: of all tensors, as stored.
        architecture: `general.architecture` of a GGUF file, else None. A hint for messages only: converters
            write wan, pig, cow or nothing.

    Raises:
        CheckpointError: model_unknown (no Wan model, a LoRA), model_unsupported (a Wan variant that is not run).
    """
    own = [name for name in names if not _is_companion(name)]
    if any(_LORA.search(name) for name in own):
        raise CheckpointError(
            "model_unknown",
            "inspect",
            f"{path} is a LoRA, not a model: it holds tensors such as {next(n for n in own if _LORA.search(n))}",
            "Give it as a LoRA, and a Wan transformer as the model",
        )
    # An all-in-one checkpoint is opened for its transformer, which has the first prefix.
    all_in_one = any(n.startswith(PREFIXES[0]) for n in own)
    convention, prefix = max(
        ((c, p) for p in PREFIXES[: 1 if all_in_one else None] for c in conventions()),
        key=lambda pair: pair[0].count(n.removeprefix(pair[1]) for n in own if n.startswith(pair[1])),
    )
    inside = [n for n in own if n.startswith(prefix)]
    canonical = {n: c for n in inside if (c := convention.canonical(n.removeprefix(prefix))) is not None}
    if len(canonical) < max(1, min(3, len(inside)), len(inside) // 3):
        raise _unknown(path, own, len(canonical), architecture)
    others = [n for n in own if n not in canonical and not (prefix and n.startswith(_OTHER_COMPONENTS))]
    if others:
        raise _unsupported(path, convention, prefix, others)
    _drop_tied_embedding(canonical)
    if len(set(canonical.values())) != len(canonical):
        raise CheckpointError(
            "file_damaged", "inspect", f"{path} holds a tensor of the model under two names", "Use another file"
        )
    return Recognised(convention, prefix, canonical)


def shard_note(path: Path) -> str:
    """What to do when the file is one shard of several; empty when its name does not say so."""
    match = _SHARD.search(path.stem)
    if match is None or int(match[2]) < 2:
        return ""
    return f"This is shard {int(match[1])} of {int(match[2])}: give the folder {path.absolute().parent}"


def _is_companion(name: str) -> bool:
    leaf = name.rpartition(".")[2]
    return (
        leaf in ROLES
        or leaf in EXTRAS
        or leaf in ("scaled_fp8", "comfy_quant")
        or name.endswith(".comfy_attention.config")
    )


def _drop_tied_embedding(canonical: dict[str, str]) -> None:
    """Of `shared.weight` and the tied `encoder.embed_tokens.weight` one is enough."""
    tied = [n for n, c in canonical.items() if c == "shared.weight"]
    if len(tied) == 2:
        del canonical[next(n for n in tied if n.endswith("embed_tokens.weight"))]


def _unknown(path: Path, names: list[str], hits: int, architecture: object) -> CheckpointError:
    family = next((title for pattern, title in _FAMILIES if any(re.match(pattern, name) for name in names)), "")
    what = f"{path} holds no Wan model"
    if architecture is not None:
        what += f": its architecture is {architecture!r:.60}, and {hits} of {len(names)} tensor names are known"
    elif family:
        what += f": it looks like {family}"
    else:
        what += f": {hits} of {len(names)} tensor names are known, the first is {sorted(names)[:1]}"
    return CheckpointError(
        "model_unknown",
        "inspect",
        what,
        shard_note(path)
        or "Give a Wan transformer, a Wan VAE or the UMT5-XXL encoder (safetensors, GGUF or a diffusers folder)",
    )


def _unsupported(path: Path, convention: Convention, prefix: str, others: list[str]) -> CheckpointError:
    bare = [n.removeprefix(prefix) for n in others]
    for pattern, title in _WAN_VARIANTS:
        if convention.kind == "transformer" and any(re.match(pattern, name) for name in bare):
            return unsupported_variant(path, title, next(n for n in bare if re.match(pattern, n)))
    return CheckpointError(
        "model_unsupported",
        "inspect",
        f"{path} holds {len(others)} tensors that the {convention.kind} does not have: {', '.join(sorted(others)[:5])}",
        "Use an unmodified Wan 2.1 or 2.2 file",
    )


def unsupported_variant(path: Path, title: str, sign: str) -> CheckpointError:
    """The error for a Wan variant that WanFit does not run."""
    return CheckpointError(
        "model_unsupported",
        "inspect",
        f"{path} is a Wan model of the kind {title}, which WanFit does not run (it has {sign})",
        "Use T2V-A14B, I2V-A14B, TI2V-5B or a plain Wan 2.1 T2V, I2V or FLF2V model",
    )
