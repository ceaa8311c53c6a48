"""UI-format workflows as prompts, the way the front end converts them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN", "COMBO")


def load(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def widgets_of(node: dict[str, Any], info: dict[str, Any]) -> dict[str, Any]:
    """The node's widget values by input name.

    Args:
        info: the node's entry in /object_info.
    """
    values = iter(node["widgets_values"])
    found: dict[str, Any] = {}
    for group in ("required", "optional"):
        for name in info["input_order"].get(group, []):
            kind, *rest = info["input"][group][name]
            options = rest[0] if rest else {}
            if isinstance(kind, str) and kind.startswith("COMFY_DYNAMICCOMBO"):
                found[name] = next(values, "auto")
                chosen = next(option for option in options["options"] if option["key"] == found[name])
                for nested in chosen["inputs"].get("required", {}):
                    found[f"{name}.{nested}"] = next(values, "auto")
                continue
            if options.get("forceInput") or not (isinstance(kind, list) or kind in _WIDGETS):
                continue
            value = next(values, options.get("default"))
            found[name] = value
            if options.get("control_after_generate") or (name in ("seed", "noise_seed") and kind == "INT"):
                next(values, None)
            if options.get("image_upload"):
                next(values, None)
    return found


def to_prompt(workflow: dict[str, Any], object_info: dict[str, Any]) -> dict[str, Any]:
    """The workflow in API format; notes are left out."""
    links = {link[0]: [str(link[1]), link[2]] for link in workflow["links"]}
    prompt: dict[str, Any] = {}
    for node in workflow["nodes"]:
        if node["type"] in ("MarkdownNote", "Note"):
            continue
        inputs = widgets_of(node, object_info[node["type"]])
        inputs |= {slot["name"]: links[slot["link"]] for slot in node["inputs"] if slot["link"] is not None}
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": inputs}
    return prompt
