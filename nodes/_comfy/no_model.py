"""What stands for a MODEL that a node does not have: an error on the node that uses it."""

from __future__ import annotations

from typing import NoReturn

from ...src.wanfit.errors import InputError
from .errors import NodeError


class MissingModel(NodeError, AttributeError):
    """Also an AttributeError: ComfyUI's caches ask outputs for attributes of their own."""


class NoModel:
    """Raises as soon as a node uses it. ComfyUI's ExecutionBlocker would tell the web page alone.

    Args:
        where: which input of which node is empty.
    """

    def __init__(self, where: str, change: str) -> None:
        self._text = InputError("part_missing", "load", f"{where}, and this node uses it", change).render({})

    def __getattr__(self, name: str) -> NoReturn:
        raise MissingModel(self._text)
