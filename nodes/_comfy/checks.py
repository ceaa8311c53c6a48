"""Checks of node inputs that ComfyUI leaves out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ...src.wanfit.errors import InputError, WanFitError
from . import folders


def files_present(kind: str, names: Mapping[str, str], **roles: str | None) -> bool | str:
    """When a prompt is queued: true, or the message for the first file that is not there.

    A linked input is None and checked later.
    """
    for role, name in roles.items():
        if name is None or name == folders.NONE:
            continue
        try:
            folders.find(kind, name, role)
        except WanFitError as error:
            return error.render(names)
    return True


def finite(numbers: Mapping[str, float], *, unit: str = "", change: str = "Use a number") -> None:
    """NaN passes ComfyUI's check of the range. Raises: InputError: number_invalid."""
    for name, value in numbers.items():
        if not math.isfinite(value):
            raise InputError("number_invalid", "input", f"<{name}> is {value}{unit}", change)


def one_of(name: str, value: str, known: Iterable[str]) -> None:
    """ComfyUI 0.3.64 does not look whether a choice exists. Raises: InputError: number_invalid."""
    known = list(known)
    if value not in known:
        raise InputError("number_invalid", "input", f"<{name}> is {value!r}", f"Use one of: {', '.join(known)}")
