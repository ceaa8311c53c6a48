"""WanFit, loaded by ComfyUI from custom_nodes/. Importing this touches neither torch nor a device."""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"


async def comfy_entrypoint() -> Any:
    """The extension with all nodes; ComfyUI calls this once at start."""
    from .nodes import WanFitExtension

    return WanFitExtension()
