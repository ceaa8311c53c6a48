"""LoRAs of a run: which file goes to which expert, and what it changes there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..blocks import BlockPatches, LowRank
from ..checkpoint import TITLES, open_checkpoint
from ..errors import InputError
from ..lora import LoraFile, Match, match, open_lora
from ..quant import StoredWeight, dequantize
from .opened import OpenTransformers

EXPERTS = ("auto", "both", "high", "low")


@dataclass(frozen=True)
class LoraChoice:
    """One LoRA that the user asks for.

    Args:
        expert: high, low or both; auto: the one that the file name speaks of, else both.
    """

    path: Path
    strength: float = 1.0
    expert: str = "auto"


@dataclass
class RestPatch:
    """Changes of one tensor outside the blocks."""

    low_rank: list[LowRank] = field(default_factory=list[LowRank])
    differences: list[tuple[float, torch.Tensor]] = field(default_factory=list[tuple[float, torch.Tensor]])

    def on(self, stored: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
        """The changed tensor on the device of `stored`: added in float32, rounded once.

        Memory: two float32 copies of the tensor for the time of the call.
        """
        total = dequantize(stored, torch.float32).clone()
        for pair in self.low_rank:
            up, down = (matrix.flatten(1).to(total.device, torch.float32) for matrix in (pair.up, pair.down))
            total.view(total.shape[0], -1).addmm_(up, down, alpha=pair.scale)
        for strength, difference in self.differences:
            total.add_(difference.to(total.device, torch.float32), alpha=strength)
        return total.to(dtype)


@dataclass
class ModelPatches:
    """All changes of one transformer: in the blocks by their number, outside by canonical tensor name."""

    blocks: dict[int, BlockPatches] = field(default_factory=dict[int, BlockPatches])
    rest: dict[str, RestPatch] = field(default_factory=dict[str, RestPatch])

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the blocks' changes on a device."""
        return sum(block.nbytes(dtype) for block in self.blocks.values())

    def largest(self, dtype: torch.dtype) -> int:
        """Bytes of the changes of the block that has most of them."""
        return max((block.nbytes(dtype) for block in self.blocks.values()), default=0)

    def add(self, found: Match, strength: float) -> None:
        """Take over what a LoRA changes; several LoRAs on one tensor add up."""
        for name, pair in found.low_rank.items():
            adapter = LowRank(pair.down.view(), pair.up.view(), strength * pair.scale)
            place, key = self._place(name)
            if isinstance(place, RestPatch):
                place.low_rank.append(adapter)
            else:
                flat = LowRank(adapter.down.flatten(1), adapter.up.flatten(1), adapter.scale)
                place.low_rank.setdefault(key.removesuffix(".weight"), []).append(flat)
        for name, difference in found.differences.items():
            change = strength * difference.scale, difference.raw.view()
            place, key = self._place(name)
            if isinstance(place, RestPatch):
                place.differences.append(change)
            else:
                place.differences.setdefault(key, []).append(change)

    def _place(self, name: str) -> tuple[BlockPatches | RestPatch, str]:
        if not name.startswith("blocks."):
            return self.rest.setdefault(name, RestPatch()), name
        _, index, key = name.split(".", 2)
        return self.blocks.setdefault(int(index), BlockPatches()), key


@dataclass(frozen=True)
class Loras:
    """The LoRAs of a run.

    Args:
        patches: of each transformer, in the order in which they run; empty when there are no LoRAs.
        applied: what was applied where, for the report.
        notices: what the user should know.
    """

    patches: Sequence[ModelPatches] = ()
    applied: Sequence[Mapping[str, Any]] = ()
    notices: Sequence[str] = ()


def check_loras(choices: Sequence[LoraChoice]) -> None:
    """Refuse strengths and experts that cannot be. Reads nothing.

    Raises: InputError lora_invalid.
    """
    for choice in choices:
        if not math.isfinite(choice.strength):
            raise InputError(
                "lora_invalid",
                "input",
                f"<lora> {choice.path.name} has the strength {choice.strength}",
                "Use a number such as 1.0; negative ones turn the effect round",
            )
        if choice.expert not in EXPERTS:
            raise InputError(
                "lora_invalid",
                "input",
                f"<lora> {choice.path.name} is for the expert {choice.expert!r}",
                f"Use one of: {', '.join(EXPERTS)}",
            )


def load_loras(choices: Sequence[LoraChoice], transformers: Sequence[tuple[str, Path]]) -> Loras:
    """`match_loras` for transformers that are not open yet: (role, file) in the order in which they run."""
    with ExitStack() as stack:
        return match_loras(choices, [(role, stack.enter_context(open_checkpoint(file))) for role, file in transformers])


def match_loras(choices: Sequence[LoraChoice], transformers: OpenTransformers) -> Loras:
    """Open the LoRAs and find what they change. Reads headers; the tensors stay memory-mapped.

    Args:
        transformers: ("high" or "low", or "" for the only one; open file), in the order in which they run.
    Raises:
        InputError: lora_invalid, lora_mismatch, lora_unsupported. CheckpointError: a file that cannot be read.
    """
    check_loras(choices)
    if not choices:
        return Loras()
    notices: list[str] = []
    applied: list[dict[str, Any]] = []
    opened: list[tuple[LoraChoice, LoraFile, set[str]]] = []
    for choice in choices:
        lora = open_lora(choice.path)
        opened.append((choice, lora, _targets(choice, lora, {role for role, _ in transformers}, notices)))
    patches: list[ModelPatches] = []
    for role, checkpoint in transformers:
        patches.append(ModelPatches())
        shapes = {name: info.shape for name, info in checkpoint.tensors.items()}
        title = TITLES[checkpoint.identity.variant]
        for choice, lora, targets in opened:
            if role not in targets:
                continue
            found = match(lora, shapes, title)
            notices += found.notices
            if choice.strength == 0:
                notices.append(f"{choice.path.name}: strength 0, not applied")
                continue
            patches[-1].add(found, choice.strength)
            applied.append(
                {
                    "file": str(choice.path),
                    "strength": choice.strength,
                    "expert": role or "single",
                    "tensors": found.count,
                    "ranks": lora.ranks,
                }
            )
    return Loras(patches, applied, list(dict.fromkeys(notices)))


def _targets(choice: LoraChoice, lora: LoraFile, roles: set[str], notices: list[str]) -> set[str]:
    """The roles of the transformers that this LoRA goes to."""
    if roles == {""}:
        if choice.expert in ("high", "low"):
            raise InputError(
                "lora_invalid",
                "input",
                f"<lora> {choice.path.name} is for the {choice.expert} expert, and the model is one without experts",
                "Leave the expert out",
            )
        return roles
    known = lora.expert in ("high", "low")
    says = f"{choice.path.name} is a LoRA of the {lora.expert}-noise expert, as its {lora.expert_source} says"
    if choice.expert == "auto" and known:
        notices.append(f"{says}: applied to that one only; say both, high or low to choose")
        return {lora.expert}
    if choice.expert in ("auto", "both"):
        return roles
    if known and lora.expert != choice.expert:
        notices.append(f"{says}; it is applied to the {choice.expert} expert, as asked")
    return {choice.expert}
