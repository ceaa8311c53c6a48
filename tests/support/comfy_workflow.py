"""UI-format workflows as prompts, converted by comfy-cli as `comfy run` does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comfy_cli.workflow_to_api import convert_ui_to_api


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def to_prompt(workflow: dict[str, Any], object_info: dict[str, Any]) -> dict[str, Any]:
    """The workflow in API format; notes are left out."""
    return convert_ui_to_api(workflow, object_info)


def widgets_of(prompt: dict[str, Any], node_id: int) -> dict[str, Any]:
    """A node's widget values by input name: what is no link."""
    inputs = prompt[str(node_id)]["inputs"]
    return {name: value for name, value in inputs.items() if not isinstance(value, list)}
