"""Opening a LoRA file: headers, checked; its tensors stay memory-mapped."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ..checkpoint.expert import expert_of
from ..checkpoint.raw import RawTensor, damaged
from ..checkpoint.reader import open_file
from ..errors import CheckpointError, InputError
from . import names

_FLOATS = ("f64", "f32", "f16", "bf16", "f8_e4m3", "f8_e5m2")


@dataclass(frozen=True)
class LowRankPair:
    """Changes a weight by `scale * up @ down`, times the strength."""

    down: RawTensor
    up: RawTensor
    alpha: float | None

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    @property
    def scale(self) -> float:
        """alpha / rank; 1 where the file gives no alpha."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in) of the weight that it is made for; a convolution's input is flattened."""
        return self.up.shape[0], math.prod(self.down.shape[1:])


@dataclass(frozen=True)
class Difference:
    """Changes a tensor by `scale * raw`, times the strength."""

    raw: RawTensor
    scale: float = 1.0


@dataclass(frozen=True)
class LoraFile:
    """An open LoRA file, by canonical names of the tensors that it changes.

    Args:
        expert: "high", "low" or "unknown", from the file name or the metadata as `expert_source` says.
        unknown: stored names of tensors that belong to no Wan transformer.
        notices: what the user should know of the file itself.
    """

    path: Path
    low_rank: Mapping[str, LowRankPair]
    differences: Mapping[str, Difference]
    unknown: tuple[str, ...]
    expert: str
    expert_source: str
    notices: tuple[str, ...]

    @property
    def ranks(self) -> list[int]:
        """The ranks that occur, smallest first."""
        return sorted({pair.rank for pair in self.low_rank.values()})


def open_lora(path: Path) -> LoraFile:
    """Open a LoRA of a Wan transformer in any dialect; reads the header and the alphas.

    Raises:
        CheckpointError: file_missing, file_unreadable, file_unsupported, file_damaged; model_unknown for a model.
        InputError: lora_unsupported for a kind that is not applied, named.
    """
    file, raw = open_file(path)
    parts: dict[str, dict[str, RawTensor]] = {}
    unknown: list[str] = []
    for tensor in raw.tensors:
        part = names.part_of(tensor.name)
        if part is None or part.module is None:
            unknown.append(tensor.name)
            continue
        if part.role not in names.APPLIED:
            raise _unsupported(path, f"a {part.role}", tensor.name)
        if tensor.dtype not in _FLOATS and part.role != names.ALPHA:
            raise _unsupported(path, f"stored as {tensor.dtype}", tensor.name)
        roles = parts.setdefault(part.module, {})
        if part.role in roles:
            raise damaged(file, f"{roles[part.role].name} and {tensor.name} both are the {part.role} of {part.module}")
        roles[part.role] = tensor
    if not parts and not any(names.part_of(name) for name in unknown):
        raise CheckpointError(
            "model_unknown",
            "inspect",
            f"{path} is not a LoRA: its first tensor is {raw.tensors[0].name if raw.tensors else 'missing'}",
            "Give a LoRA there, and models as <high> and <low>",
        )
    low_rank: dict[str, LowRankPair] = {}
    differences: dict[str, Difference] = {}
    for module, roles in parts.items():
        pair = _pair(module, roles)
        if pair is not None:
            low_rank[names.tensor_of(module, names.DOWN)] = pair
        for role in (names.DIFF, names.DIFF_BIAS, names.DIFF_MODULATION):
            if role in roles:
                differences[names.tensor_of(module, role)] = Difference(roles[role])
        if names.BIAS in roles:
            target = names.tensor_of(module, names.BIAS)
            if pair is None or target in differences:
                raise damaged(file, f"{roles[names.BIAS].name} belongs to no LoRA, or the bias has a diff_b as well")
            differences[target] = Difference(roles[names.BIAS], pair.scale)
        if roles.keys() == {names.ALPHA}:
            unknown.append(roles[names.ALPHA].name)
    expert, source = expert_of(path, raw.metadata)
    notices = _scale_notices(path, raw.metadata, low_rank)
    return LoraFile(path, low_rank, differences, tuple(unknown), expert, source, notices)


def _pair(module: str, roles: Mapping[str, RawTensor]) -> LowRankPair | None:
    down, up = roles.get(names.DOWN), roles.get(names.UP)
    if down is None and up is None:
        return None
    if down is None or up is None:
        there = cast("RawTensor", down or up)
        raise damaged(there.file, f"{there.name} has no {'up' if up is None else 'down'} tensor beside it")
    alpha = _alpha(roles[names.ALPHA]) if names.ALPHA in roles else None
    fits = len(down.shape) >= 2 and len(up.shape) >= 2 and math.prod(up.shape[1:]) == down.shape[0] > 0
    if not fits:
        raise damaged(down.file, f"the LoRA of {module} is {up.shape} and {down.shape}, which cannot be multiplied")
    return LowRankPair(down, up, alpha)


def _alpha(tensor: RawTensor) -> float:
    value = float(tensor.view()) if math.prod(tensor.shape) == 1 else math.nan
    if not math.isfinite(value):
        raise damaged(tensor.file, f"{tensor.name} of shape {list(tensor.shape)} is not one finite number")
    return value


def _scale_notices(path: Path, metadata: Mapping[str, object], low_rank: Mapping[str, LowRankPair]) -> tuple[str, ...]:
    """diffusers writes a scale into the metadata that other programs do not read."""
    text = metadata.get("lora_adapter_metadata")
    if not isinstance(text, str) or any(pair.alpha is not None for pair in low_rank.values()):
        return ()
    try:
        config = json.loads(text)
    except ValueError:
        return (f"{path.name}: its lora_adapter_metadata is not valid JSON and was not read",)
    if not isinstance(config, dict):
        return ()
    values = {str(key).rpartition(".")[2]: value for key, value in cast("dict[object, object]", config).items()}
    alpha, rank = values.get("lora_alpha"), values.get("r")
    if not isinstance(alpha, int | float) or not isinstance(rank, int) or rank < 1 or alpha == rank:
        return ()
    return (
        f"{path.name}: its metadata gives lora_alpha {alpha:g} at rank {rank}, but it has no alpha tensors; its "
        f"scale is taken as 1, as ComfyUI does. diffusers takes {alpha / rank:g}: multiply the strength by it for that",
    )


def _unsupported(path: Path, what: str, name: str) -> InputError:
    return InputError(
        "lora_unsupported",
        "load",
        f"{path.name} is {what}, which WanFit does not apply ({name})",
        "Use a plain LoRA (down, up, alpha), with diff and diff_b if it has them",
    )
