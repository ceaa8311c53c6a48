"""`auto`, or a number: how a size is given."""

from __future__ import annotations

import argparse
from typing import Any


def auto_or_number(text: str) -> int | str:
    """For `argparse`."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a whole number nor auto") from None


def add_auto_options(group: Any) -> None:
    """What `auto` may do, for `plan` and `generate`."""
    group.add_argument("--portrait", action="store_true", help="with an automatic size: upright / 自动尺寸时：竖屏")
    group.add_argument(
        "--prefer",
        choices=("size", "length"),
        default="size",
        help="what to keep when it does not fit (default: size) / 放不下时保留尺寸（size，默认）或长度（length）",
    )
