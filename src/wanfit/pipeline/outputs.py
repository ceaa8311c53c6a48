"""Where results go: a path is checked before any work is done, and a file is written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ..errors import OutputError


def check_output(name: str, path: Path, suffix: str) -> None:
    """Refuse a path that cannot take a result. The suffix keeps a report from replacing a video, an image or a model.

    Args:
        name: the input's engine name, for messages. suffix: what the path must end in, such as `.mp4`.
    Raises:
        OutputError: output_unwritable: a folder, another suffix, a folder that is missing.
    """
    if path.is_dir():
        raise OutputError(
            "output_unwritable",
            "input",
            f"<{name}> {path} is a folder",
            f"Give the name of a file, such as {path / ('result' + suffix)}",
        )
    if path.suffix.lower() != suffix:
        raise OutputError(
            "output_unwritable",
            "input",
            f"<{name}> is {path}, which does not end in {suffix}",
            f"Use {path.with_suffix(suffix)}",
        )
    if not path.parent.is_dir():
        raise OutputError(
            "output_unwritable", "input", f"the folder {path.parent} of <{name}> does not exist", "Create it first"
        )


def unfinished(path: Path) -> Path:
    """Where a file is written until it is whole: beside its place, hidden, not another process's."""
    return path.with_name(f".{path.stem}.{os.getpid()}.part{path.suffix}")


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """Gives the path of a temporary file beside `path`, which takes its place at the end; after an error it is gone."""
    temporary = unfinished(path)
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
