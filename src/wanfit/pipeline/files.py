"""Which files make up the model: given one by one, or found in a folder by what their headers say."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ..checkpoint import Identity, component_folders, open_checkpoint
from ..errors import CheckpointError, InputError, WanFitError

SUFFIXES = frozenset({".safetensors", ".gguf"})


@dataclass(frozen=True)
class ModelFiles:
    """Paths of one complete model. `low` is None for a model with a single transformer."""

    high: Path
    low: Path | None
    text_encoder: Path
    vae: Path
    tokenizer: Path | None = None

    @property
    def transformers(self) -> list[tuple[str, Path]]:
        """(name, file) in the order in which they run: high and low, or one without a name."""
        return [("", self.high)] if self.low is None else [("high", self.high), ("low", self.low)]


def find_model(
    folder: Path | None,
    *,
    high: Path | None = None,
    low: Path | None = None,
    text_encoder: Path | None = None,
    vae: Path | None = None,
    tokenizer: Path | None = None,
) -> ModelFiles:
    """Put a model together from single files and a folder; a file that is given wins over the folder.

    Args:
        folder: a diffusers pipeline folder, a Wan-AI repository, or a folder like ComfyUI's `models` in which
            each part occurs once. Only headers are read.
        high: the high-noise expert, or the only transformer of the model.
    Raises:
        InputError: a part is missing. CheckpointError: a part occurs more than once in the folder, or a file
        is damaged.
    """
    found: dict[str, Path | None] = {
        "high": high,
        "low": low,
        "text_encoder": text_encoder,
        "vae": vae,
        "tokenizer": tokenizer,
    }
    unread: list[str] = []
    if folder is not None:
        given = {role for role, path in found.items() if path is not None}
        if high is not None:  # alone, it must not be paired with a low expert of the folder
            given.add("low")
        parts, unread = _parts_of(folder, given)
        found |= {role: path for role, path in parts.items() if role not in given}
    missing = [role for role in ("high", "text_encoder", "vae") if found[role] is None]
    if missing:
        where = f" and {folder} holds none{_list(unread)}" if folder is not None else ""
        raise InputError(
            "part_missing",
            "input",
            f"no file for {', '.join(f'<{role}>' for role in missing)} is given{where}",
            "Give each part its file, or <model> a folder that holds all of them",
        )
    return ModelFiles(
        high=_present(found["high"]),
        low=found["low"],
        text_encoder=_present(found["text_encoder"]),
        vae=_present(found["vae"]),
        tokenizer=found["tokenizer"],
    )


def _present(path: Path | None) -> Path:
    if path is None:
        raise LookupError("checked by the caller")
    return path


def _list(unread: list[str]) -> str:
    return f" that can be used ({'; '.join(unread[:5])})" if unread else ""


def _parts_of(folder: Path, given: set[str]) -> tuple[dict[str, Path], list[str]]:
    """The file of each role, and what files that cannot be used are instead; of a role that is `given` any."""
    if not folder.is_dir():
        change = "Give a single file as <high>, <low>, <text_encoder> or <vae>" if folder.exists() else "Check the path"
        raise CheckpointError("file_missing", "load", f"<model> {folder} is not a folder", change)
    try:
        components = component_folders(folder)
    except CheckpointError:
        components = {}
    if "transformer" in components:
        roles = {"transformer": "high", "transformer_2": "low"}
        return {roles.get(name, name): path for name, path in components.items()}, []
    parts: dict[str, list[Path]] = {}
    unread: list[str] = []
    for path in _model_files(folder):
        try:
            with open_checkpoint(path) as checkpoint:
                parts.setdefault(_role(checkpoint.identity), []).append(path)
        except WanFitError as error:
            unread.append(f"{path.name}: {error.code}")
    several = {role: paths for role, paths in parts.items() if len(paths) > 1 and role not in given}
    if several:
        listed = (
            f"{len(paths)} files for <{role}>: {', '.join(str(path.relative_to(folder)) for path in paths)}"
            for role, paths in several.items()
        )
        raise CheckpointError(
            "part_ambiguous",
            "load",
            f"{folder} holds {'; '.join(listed)}",
            f"Say which with {' and '.join(f'<{role}>' for role in several)}",
        )
    if not parts:
        raise CheckpointError(
            "model_unknown",
            "load",
            f"{folder} holds no Wan model file{_list(unread)}",
            "Give a diffusers folder, or one with .safetensors or .gguf files of a Wan model",
        )
    return {role: paths[0] for role, paths in parts.items()}, unread


def files_inside(folder: Path) -> list[Path]:
    """What there is to open in a folder that is not one model: a pipeline's parts, else every file of a known type."""
    try:
        components = component_folders(folder)
    except CheckpointError:
        components = {}
    if "transformer" in components:
        return [path for name, path in components.items() if name != "tokenizer"]
    return _model_files(folder)


def _model_files(folder: Path) -> list[Path]:
    """Also in linked folders, as ComfyUI's often are, each once.

    Raises: CheckpointError: file_unreadable, for a folder that may not be looked into.
    """
    found: list[Path] = []
    seen: set[Path] = set()
    for root, folders, names in os.walk(folder, onerror=_unreadable, followlinks=True):
        if (real := Path(root).resolve()) in seen:
            folders.clear()
            continue
        seen.add(real)
        found += [path for name in names if (path := Path(root, name)).suffix.lower() in SUFFIXES and path.is_file()]
    return sorted(found)


def _unreadable(error: OSError) -> NoReturn:
    raise CheckpointError(
        "file_unreadable", "load", f"{error.filename} cannot be opened: {error.strerror}", "Check the permissions"
    ) from error


def _role(identity: Identity) -> str:
    if identity.kind != "transformer":
        return identity.kind
    return "low" if identity.expert == "low" else "high"
