"""Checks that run when a prompt is queued, before any node does."""

from __future__ import annotations

from collections.abc import Mapping

from ...src.wanfit.errors import WanFitError
from . import folders


def files_present(kind: str, names: Mapping[str, str], **roles: str | None) -> bool | str:
    """True, or the message for the first file that is not there. A linked input is None and checked later."""
    for role, name in roles.items():
        if name is None or name == folders.NONE:
            continue
        try:
            folders.find(kind, name, role)
        except WanFitError as error:
            return error.render(names)
    return True
