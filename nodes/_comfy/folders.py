"""Model files in ComfyUI's folders. GGUF files get keys of their own: the core's loaders cannot read them."""

from __future__ import annotations

from pathlib import Path

import folder_paths

from ...src.wanfit.errors import CheckpointError
from ..recipes import DOWNLOADS

NONE = "none"
_SUFFIXES = (".safetensors", ".sft")


def register() -> None:
    """Make the .gguf files below `diffusion_models` and `text_encoders` known under own keys."""
    for kind in ("diffusion_models", "text_encoders"):
        folder_paths.folder_names_and_paths[_gguf(kind)] = (folder_paths.get_folder_paths(kind), {".gguf"})


def files(kind: str) -> list[str]:
    """Names of the model files of `diffusion_models` or `text_encoders`."""
    plain = [name for name in folder_paths.get_filename_list(kind) if name.lower().endswith(_SUFFIXES)]
    return sorted({*plain, *folder_paths.get_filename_list(_gguf(kind))}, key=str.lower)


def find(kind: str, name: str, role: str) -> Path:
    """Path of a file that `files` lists.

    Raises:
        CheckpointError: file_missing: says where to get the file and where to put it. `role` is the input's
            engine name.
    """
    key = _gguf(kind) if name.lower().endswith(".gguf") else kind
    found = folder_paths.get_full_path(key, name)
    if found is None:
        source = f"Get it from {DOWNLOADS[name]} and put" if name in DOWNLOADS else "Put"
        listed = sorted(folder_paths.get_folder_paths(kind), key=lambda path: Path(path).name != kind)
        written = Path(folder_paths.get_output_directory())  # of other nodes; nobody puts a download there
        places = " or ".join(path for path in listed if written not in Path(path).parents)
        missing = f"is {name!r}, and no such file is in the {kind} folder" if name else "is empty: no file is chosen"
        raise CheckpointError(
            "file_missing",
            "load",
            f"<{role}> {missing}",
            f"{source} it into {places}, then press R to refresh the list",
        )
    return Path(found)


def fingerprint(kind: str, *names: str) -> tuple[tuple[str, int, int], ...]:
    """Changes when one of the files does; a missing file counts as size -1."""
    marks: list[tuple[str, int, int]] = []
    for name in names:
        path = folder_paths.get_full_path(_gguf(kind) if name.lower().endswith(".gguf") else kind, name)
        state = Path(path).stat() if path else None
        marks.append((name, state.st_mtime_ns, state.st_size) if state else (name, 0, -1))
    return tuple(marks)


def _gguf(kind: str) -> str:
    return f"wanfit_{kind}_gguf"
