"""A LoRA against the model that it is to change."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..errors import InputError
from .reader import Difference, LoraFile, LowRankPair

_FAMILIES = (
    (r"lora_unet_(input|output)_blocks|lora_unet_(down|up|mid)_block|unet\.(down|up|mid)_block", "Stable Diffusion"),
    (r"(double|single)_blocks[._]\d+[._](img|txt)_(attn|mlp)[._](qkv|proj|0|2)|single_transformer_blocks", "Flux"),
    (r"(double|single)_blocks[._]\d", "Flux or HunyuanVideo"),
    (r"transformer_blocks[._]\d+[._](img_mod|attn[._]add_q_proj)", "Qwen-Image"),
    (r"vace_blocks", "Wan VACE"),
    (r"transformer_blocks[._]\d", "another diffusion transformer (LTX, CogVideoX ...)"),
    (r"lora_te\d?_|text_encoder|text_model", "a text encoder"),
)
_WIDTHS = {5120: "a 14B model", 3072: "TI2V-5B", 1536: "T2V-1.3B"}
_LISTED = 6


@dataclass(frozen=True)
class Match:
    """What a LoRA changes of one model, by canonical tensor names; `notices` say what it does not."""

    low_rank: Mapping[str, LowRankPair]
    differences: Mapping[str, Difference]
    notices: tuple[str, ...]

    @property
    def count(self) -> int:
        """Tensors that are changed."""
        return len(self.low_rank) + len(self.differences)


def match(lora: LoraFile, shapes: Mapping[str, tuple[int, ...]], model: str) -> Match:
    """Find the tensors that a LoRA changes, and check that it was made for them.

    Embedding and head alone may differ, as between T2V and I2V: they are left out with a notice.

    Args:
        shapes: of all tensors of the model, by canonical name.
        model: its name, for messages.
    Raises:
        InputError: lora_mismatch: nothing fits, or tensors of blocks have other shapes.
    """
    changed = [*lora.low_rank, *lora.differences]
    if not any(name in shapes for name in changed):
        raise _nothing_fits(lora, model)
    misfits = {
        name: (found, shapes[name])
        for name, found in [
            *((name, pair.shape) for name, pair in lora.low_rank.items()),
            *((name, difference.raw.shape) for name, difference in lora.differences.items()),
        ]
        if name in shapes and not _fits(found, shapes[name], name in lora.low_rank)
    }
    in_blocks = sorted(name for name in misfits if name.startswith("blocks."))
    fitting = [name for name in changed if name in shapes and name not in misfits]
    if in_blocks or not fitting:
        raise _other_shapes(lora, model, misfits, (in_blocks or sorted(misfits))[0])
    notices = [
        f"{lora.path.name}: {name} of the LoRA is {_shape(found)} and {model} has {_shape(wanted)}: left out"
        for name, (found, wanted) in misfits.items()
    ]
    absent = [name for name in changed if name not in shapes]
    if absent:
        notices.append(f"{lora.path.name}: {len(absent)} of {len(changed)} tensors are not in {model}: {_list(absent)}")
    if lora.unknown:
        what = f"{len(lora.unknown)} tensors are of no Wan transformer"
        notices.append(f"{lora.path.name}: {what}: {_list(lora.unknown)}")
    return Match(
        {name: pair for name, pair in lora.low_rank.items() if name in fitting},
        {name: difference for name, difference in lora.differences.items() if name in fitting},
        (*lora.notices, *notices),
    )


def _fits(found: tuple[int, ...], wanted: tuple[int, ...], low_rank: bool) -> bool:
    if not low_rank:
        return found == wanted
    return len(wanted) >= 2 and found == (wanted[0], math.prod(wanted[1:]))


def _nothing_fits(lora: LoraFile, model: str) -> InputError:
    family = next((title for pattern, title in _FAMILIES if any(re.search(pattern, n) for n in lora.unknown)), "")
    names = [*lora.low_rank, *lora.differences, *lora.unknown]
    return InputError(
        "lora_mismatch",
        "load",
        f"none of the {len(names)} tensors of {lora.path.name} is for {model}: "
        + (f"it is a LoRA for {family}" if family else f"it holds {_list(names)}"),
        "Use a LoRA that was made for this model",
    )


def _other_shapes(
    lora: LoraFile, model: str, misfits: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]], first: str
) -> InputError:
    found, wanted = misfits[first]
    seems = next((_WIDTHS[size] for size in (found[-1], found[0]) if size in _WIDTHS and size not in wanted), "")
    return InputError(
        "lora_mismatch",
        "load",
        f"{len(misfits)} tensors of {lora.path.name} do not fit {model}: {first} of the LoRA is {_shape(found)} and "
        f"that of the model {_shape(wanted)}" + (f"; the LoRA is for {seems}" if seems else ""),
        "Use a LoRA that was made for this model",
    )


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))


def _list(names: Iterable[str]) -> str:
    """Names with block numbers taken together: `blocks.*.cross_attn.k_img.weight (40)`."""
    kinds = Counter(re.sub(r"(blocks[._])\d+", r"\1*", name) for name in names)
    shown = [f"{name} ({count})" if count > 1 else name for name, count in kinds.most_common(_LISTED)]
    return ", ".join(shown) + (f" and {len(kinds) - _LISTED} more kinds" if len(kinds) > _LISTED else "")
