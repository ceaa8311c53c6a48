"""LoRA files that a graph puts on a MODEL, by their names: core's loaders leave none on the MODEL itself."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import folder_paths

from ...src.wanfit.checkpoint.expert import expert_of
from ...src.wanfit.checkpoint.reader import open_file
from ...src.wanfit.errors import CheckpointError

_PAIR = ("model", "model_low")
"""Inputs of a node that hands both experts on, in the order of its outputs."""


def misplaced(prompt: Mapping[str, Any], node: str) -> list[str]:
    """What to say of each LoRA that was made for the other expert than the one it is on.

    Args:
        prompt: in API format. node: with inputs `model_high` and `model_low`.
    """
    inputs = prompt.get(node, {}).get("inputs", {})
    said: list[str] = []
    for expert in ("high", "low"):
        for name in _loras(prompt, inputs.get(f"model_{expert}")):
            found = folder_paths.get_full_path("loras", name)
            made_for, source = _expert(Path(found)) if found else ("unknown", "")
            if made_for not in ("unknown", expert):
                said.append(
                    f"note: {name} is a LoRA of the {made_for}-noise expert, as its {source} says, and is on "
                    f"model_{expert}"
                )
    return said


def _loras(prompt: Mapping[str, Any], link: Any) -> Iterator[str]:
    """Values of `lora_name` on the way up from a link."""
    while isinstance(link, list) and len(link) == 2 and link[0] in prompt:
        number, slot = link
        inputs = prompt[number]["inputs"]
        if isinstance(inputs.get("lora_name"), str):
            yield inputs["lora_name"]
        link = inputs.get(_PAIR[slot] if "model_low" in inputs and slot in (0, 1) else "model")


def _expert(path: Path) -> tuple[str, str]:
    try:
        return expert_of(path, open_file(path)[1].metadata)
    except CheckpointError:  # core has read it, in a container that we do not know
        return expert_of(path, {})
