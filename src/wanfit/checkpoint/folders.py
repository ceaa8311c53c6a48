"""Folders of model files: diffusers components, shards, whole pipelines."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, cast

from ..errors import CheckpointError

_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_MAX_JSON_BYTES = 16 * 2**20
_PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")


def component_folders(root: Path) -> Mapping[str, Path]:
    """The components of a pipeline folder, by diffusers' names; those that are not there are left out.

    Reads the layout of diffusers (transformer, transformer_2, vae, text_encoder, tokenizer) and of the original
    repositories (high_noise_model, low_noise_model, and Wan2.x_VAE, models_t5_* when they are safetensors).

    Raises:
        CheckpointError: file_missing when `root` is no folder or holds no component; file_unreadable.
    """
    if not root.is_dir():
        raise CheckpointError("file_missing", "inspect", f"{root} is not a folder", "Give the folder of a pipeline")
    if not os.access(root, os.R_OK | os.X_OK):
        raise CheckpointError("file_unreadable", "inspect", f"{root} cannot be opened", "Check the permissions")
    names = ("transformer", "transformer_2", "vae", "text_encoder", "tokenizer")
    found = {name: root / name for name in names if (root / name).is_dir()}
    for name, original in (("transformer", "high_noise_model"), ("transformer_2", "low_noise_model")):
        if name not in found and (root / original).is_dir():
            found[name] = root / original
    if "transformer" not in found and list(root.glob("diffusion_pytorch_model*.safetensors")):
        found["transformer"] = root
    for name, pattern in (("vae", "Wan2*_VAE.safetensors"), ("text_encoder", "models_t5*.safetensors")):
        files = sorted(root.glob(pattern))
        if name not in found and len(files) == 1:
            found[name] = files[0]
    if "tokenizer" not in found and (root / "google" / "umt5-xxl").is_dir():
        found["tokenizer"] = root / "google" / "umt5-xxl"
    if not found:
        raise CheckpointError(
            "file_missing",
            "inspect",
            f"{root} holds no component of a Wan pipeline (transformer, vae, text_encoder ...)",
            "Give the folder that contains model_index.json, or single files",
        )
    return found


def model_files(folder: Path) -> tuple[list[Path], Mapping[str, str], Mapping[str, object]]:
    """The safetensors files of one component.

    Returns:
        The files; tensor name -> file name as the index states it (empty without an index); config.json.

    Raises:
        CheckpointError: file_missing, file_damaged, file_unsupported, with what to give instead.
    """
    config = _read_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    files = sorted(folder.glob("*.safetensors"))
    indices = sorted(folder.glob("*" + _INDEX))
    if len(indices) > 1:
        indices = [i for i in indices if i.name.count(".") == 3] or indices
    if len(indices) > 1:
        raise _ambiguous(folder, indices)
    if indices:
        weight_map = _weight_map(indices[0])
        wanted = sorted(set(weight_map.values()))
        _require(folder, wanted, indices[0].name)
        return [folder / name for name in wanted], weight_map, config
    if not files:
        raise _no_model(folder)
    if len(files) == 1 and not _SHARD.fullmatch(files[0].name):
        others = [] if config else sorted(folder.glob("*.gguf"))
        if others:
            raise _ambiguous(folder, [*files, *others])
        return files, {}, config
    shards = [match for file in files if (match := _SHARD.fullmatch(file.name))]
    series = {(match["stem"], match["count"]) for match in shards}
    if len(series) != 1 or len(shards) != len(files):
        raise _ambiguous(folder, files)
    stem, count = series.pop()
    wanted = [f"{stem}-{number:05d}-of-{count}.safetensors" for number in range(1, min(int(count), 9999) + 1)]
    _require(folder, wanted, "the numbering of the shards")
    return [folder / name for name in wanted], {}, config


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = _read_json(index).get("weight_map")
    entries = cast("dict[str, Any]", weight_map) if isinstance(weight_map, dict) else {}
    if not entries or not all(isinstance(name, str) for name in entries.values()):
        raise CheckpointError("file_damaged", "inspect", f"{index} has no valid weight_map", "Download it again")
    for name in entries.values():
        if PurePosixPath(name).name != name or PureWindowsPath(name).name != name or name in ("", "..", "."):
            raise CheckpointError(
                "file_damaged",
                "inspect",
                f"{index} names the file {name!r:.100}, which is not in its folder",
                "Do not use this folder",
            )
    return cast("dict[str, str]", entries)


def _require(folder: Path, wanted: list[str], reason: str) -> None:
    missing = [name for name in wanted if not (folder / name).is_file()]
    if missing:
        raise CheckpointError(
            "file_missing",
            "inspect",
            f"{folder} lacks {len(missing)} of {len(wanted)} files that {reason} names: {', '.join(missing[:5])}",
            "Download the missing files",
        )


def _ambiguous(folder: Path, files: list[Path]) -> CheckpointError:
    return CheckpointError(
        "file_unsupported",
        "inspect",
        f"{folder} holds several models: {', '.join(f.name for f in files[:5])}",
        "Give one of the files",
    )


def _no_model(folder: Path) -> CheckpointError:
    inside = [n for n in ("transformer", "high_noise_model", "vae", "text_encoder") if (folder / n).is_dir()]
    ggufs = sorted(folder.glob("*.gguf"))
    pickles = [f for f in sorted(folder.iterdir()) if f.suffix.lower() in _PICKLES]
    if inside:
        change = f"This is a whole pipeline: give one component, for example {folder / inside[0]}"
    elif ggufs:
        change = f"Give one of its GGUF files, for example {ggufs[0]}"
    elif pickles:
        change = f"{pickles[0].name} is a pickle: convert it to safetensors"
    else:
        change = "Give a folder with safetensors files, or one .safetensors or .gguf file"
    return CheckpointError("file_missing", "inspect", f"{folder} holds no safetensors model", change)


def _read_json(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_JSON_BYTES + 1)
    except OSError as error:
        raise CheckpointError(
            "file_unreadable", "inspect", f"{path} cannot be opened: {error.strerror or error}", "Check the permissions"
        ) from error
    if len(text) > _MAX_JSON_BYTES:
        raise CheckpointError(
            "file_damaged", "inspect", f"{path} has more than {_MAX_JSON_BYTES} bytes", "Download it again"
        )
    try:
        value = json.loads(text.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            "file_damaged", "inspect", f"{path} is not valid JSON ({str(error)[:120]})", "Download it again"
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError("file_damaged", "inspect", f"{path} is not a JSON object", "Download it again")
    return cast("dict[str, object]", value)
