"""From a name in a LoRA file to the tensor of the model and the part that it plays there."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from ..checkpoint.names import to_diffusers_transformer
from ..checkpoint.structure import transformer_tensors

_PREFIX = re.compile(
    r"(base_model\.model\.|model\.|diffusion_model\.|transformer\.|unet\.|pipe\.dit\."
    r"|lora_unet__?|lora_transformer_|lycoris_)+"
)
_BLOCK = re.compile(r"blocks[._](?P<index>0|[1-9]\d{0,3})[._](?P<rest>.+)")

DOWN, UP, ALPHA, BIAS, DIFF, DIFF_BIAS, DIFF_MODULATION = (
    "down",
    "up",
    "alpha",
    "bias",
    "diff",
    "diff_b",
    "diff_m",
)
_ROLES = {
    DOWN: r"\.lora_(?:down|A)(?:\.\w+)?\.weight|\.lora_A|[._]lora\.down\.weight|\.lora_linear_layer\.down\.weight",
    UP: r"\.lora_(?:up|B)(?:\.\w+)?\.weight|\.lora_B|[._]lora\.up\.weight|\.lora_linear_layer\.up\.weight",
    BIAS: r"\.lora_(?:up|B)(?:\.\w+)?\.bias",
    ALPHA: r"\.alpha",
    DIFF: r"\.(?:diff|w_norm)",
    DIFF_BIAS: r"\.(?:diff_b|b_norm)",
    DIFF_MODULATION: r"\.diff_m",
    "DoRA": r"\.dora_scale|\.lora_magnitude_vector(?:\.\w+)?(?:\.weight)?",
    "LoKr": r"\.lokr_\w+",
    "LoHa": r"\.hada_\w+",
    "LoCon with a middle tensor": r"\.lora_mid\.weight",
    "GLoRA": r"\.[ab][12]\.weight",
    "OFT": r"\.oft_\w+(?:\.weight)?",
    "LoRA that changes the shape of its tensor": r"\.reshape_weight",
    "LoRA that replaces tensors": r"\.set_weight",
}
_ROLE_OF = re.compile("|".join(f"(?P<r{i}>(?:{pattern})$)" for i, pattern in enumerate(_ROLES.values())))
APPLIED = frozenset({DOWN, UP, ALPHA, BIAS, DIFF, DIFF_BIAS, DIFF_MODULATION})


@dataclass(frozen=True)
class Part:
    """One tensor of a LoRA file.

    Args:
        module: canonical name of what it changes, without `.weight` or `.bias`: `blocks.3.self_attn.q`,
            `head.head`, `blocks.3.modulation`; None for a name that no Wan transformer has.
        role: one of `APPLIED`, or the name of a kind that is not applied.
    """

    module: str | None
    role: str


def part_of(name: str) -> Part | None:
    """What a tensor of a LoRA file is; None for a name that is not of a LoRA."""
    match = _ROLE_OF.search(name)
    if match is None:
        return None
    role = next(r for i, r in enumerate(_ROLES) if match[f"r{i}"] is not None)
    stem = name[: match.start()]
    module = _module(f"{stem}.modulation") if role == DIFF_MODULATION else None
    return Part(module or _module(stem), role)


def tensor_of(module: str, role: str) -> str:
    """The canonical name of the tensor that this part of `module` changes."""
    if role in (BIAS, DIFF_BIAS):
        return f"{module}.bias"
    return module if module.endswith(("modulation", "emb_pos")) else f"{module}.weight"


def _module(stem: str) -> str | None:
    prefix = _PREFIX.match(stem)
    bare = stem[prefix.end() :] if prefix else stem
    fixed, block = spellings()
    if found := _BLOCK.fullmatch(bare):
        rest = block.get(found["rest"])
        return f"blocks.{found['index']}.{rest}" if rest else None
    return fixed.get(bare)


@cache
def spellings() -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Every spelling of a module -> its canonical name: outside the blocks, and inside a block.

    Original and diffusers' names, each with dots, or as kohya's trainers write it: with underscores instead.
    """
    names = transformer_tensors(
        dim=1, ffn_dim=1, num_layers=1, in_channels=1, out_channels=1, text_dim=1, freq_dim=1, image_dim=1,
        image_positions=1,
    )  # fmt: skip
    fixed: dict[str, str] = {}
    block: dict[str, str] = {}
    for name in names:
        if name.endswith(".bias"):
            continue
        table, start = (block, "blocks.0.") if name.startswith("blocks.") else (fixed, "")
        module = name.removesuffix(".weight")
        for spelled in (module, to_diffusers_transformer(name).removesuffix(".weight")):
            for text in (spelled.removeprefix(start), spelled.removeprefix(start).replace(".", "_")):
                if table.setdefault(text, module.removeprefix(start)) != module.removeprefix(start):
                    raise LookupError(f"{text} could be two modules")
    return fixed, block
