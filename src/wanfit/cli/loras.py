"""`--lora FILE[:STRENGTH][:EXPERT]`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from ..pipeline.loras import LoraChoice


def read_lora(text: str) -> LoraChoice:
    """Take the argument apart from its end; what is left is the path, with its drive letter if it has one.

    Raises: InputError lora_invalid.
    """
    from ..pipeline.loras import EXPERTS, LoraChoice

    head, strength, expert = text, 1.0, "auto"
    if not Path(text).is_file():
        before, _, last = head.rpartition(":")
        if before and last in EXPERTS:
            head, expert = before, last
        before, _, last = head.rpartition(":")
        drive = len(before) == 1 and before.isalpha() and last[:1] in ("/", "\\")
        if before and not drive:
            head, strength = before, _number(text, last)
    if not head:
        raise InputError("lora_invalid", "input", f"<lora> {text!r} names no file", "Give FILE:STRENGTH")
    return LoraChoice(Path(head), strength, expert)


def _number(text: str, last: str) -> float:
    try:
        return float(last)
    except ValueError:
        raise InputError(
            "lora_invalid",
            "input",
            f"<lora> {text!r} ends in {last!r}, which is neither a strength nor high, low or both",
            "Give FILE, FILE:0.8 or FILE:0.8:high",
        ) from None
