"""WanFit, loaded by ComfyUI from custom_nodes/. Importing this touches neither torch nor a device."""

from __future__ import annotations

from typing import Any

WEB_DIRECTORY = "./web"
MINIMUM_COMFYUI = "0.3.64"


async def comfy_entrypoint() -> Any:
    """The extension with all nodes; ComfyUI calls this once at start."""
    from .nodes import WanFitExtension

    return WanFitExtension()


def _check_comfyui() -> None:
    """Refuse a ComfyUI that is too old, in the line that it prints for a pack that fails to import.

    Raises: ImportError.
    """
    try:
        from comfyui_version import __version__ as version
    except ImportError:  # no ComfyUI around, or one so old that it says itself that it finds no nodes here
        return
    if _numbers(version) < _numbers(MINIMUM_COMFYUI):
        raise ImportError(f"WanFit needs ComfyUI {MINIMUM_COMFYUI} or newer, and this is {version}. Update ComfyUI.")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".") if part.isdigit()]


_check_comfyui()
