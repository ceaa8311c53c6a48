"""Which expert a file holds. The tensors do not tell; names and metadata do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_VERSION = re.compile(r"wan[\s._-]*2[._-]?([12])(?!\d)", re.IGNORECASE)
_EXPERTS = ("high", "low")
# "high quality", "low VRAM" ... say nothing about the expert.
_OTHER_MEANING = re.compile(
    r"contrast|def|definition|details?|end|fidelity|fps|framerate|fx|mem|memory|motion|performance|poly|power"
    r"|precision|quality|ram|rank|res|resolution|resource|speed|spec|steps?|vram"
)
_METADATA_KEYS = ("general.name", "modelspec.title", "name", "title")


def expert_of(path: Path, metadata: Mapping[str, object]) -> tuple[str, str]:
    """The expert and where it says so.

    Looks at the file name, then at metadata, then at the folder that holds the file; a folder of shards is
    looked up as a folder.

    Returns:
        ("high" | "low" | "unknown", "file name" | "metadata" | "folder" | "").
    """
    if path.is_dir():
        files = list(path.glob("*.safetensors"))
        alone = [files[0].stem] if len(files) == 1 else []
        candidates = [("file name", alone), ("metadata", _titles(metadata)), ("folder", [_folder_word(path)])]
    else:
        candidates = [
            ("file name", [path.stem]),
            ("metadata", _titles(metadata)),
            ("folder", [_folder_word(path.absolute().parent)]),
        ]
    for source, texts in candidates:
        for text in texts:
            if expert := expert_in(text):
                return expert, source
    return "unknown", ""


def expert_in(text: str) -> str:
    """The expert that a name speaks of: "high", "low" or "" when it names none or both."""
    words = [word.lower() for word in _WORD.findall(text)]
    pairs = [*pairwise([*words, ""])]
    certain = {
        expert
        for word, following in pairs
        for expert in _EXPERTS
        if word == expert + "noise" or (word == expert and following == "noise")
    }
    found = certain or {
        word for word, following in pairs if word in _EXPERTS and not _OTHER_MEANING.fullmatch(following)
    }
    return found.pop() if len(found) == 1 else ""


def version_in(path: Path) -> str:
    """The Wan version that the file name or one of its two parent folders states: "2.1", "2.2" or ""."""
    absolute = path.absolute()
    for name in (absolute.name, *(parent.name for parent in list(absolute.parents)[:2])):
        if match := _VERSION.search(name):
            return f"2.{match[1]}"
    return ""


def _folder_word(folder: Path) -> str:
    """A text that names the expert; diffusers' folder names are spelled out when there are two of them."""
    absolute = folder.absolute()
    if absolute.name == "transformer_2":
        return "low noise"
    if absolute.name == "transformer" and (absolute.parent / "transformer_2").is_dir():
        return "high noise"
    return absolute.name


def _titles(metadata: Mapping[str, object]) -> list[str]:
    return [value for key in _METADATA_KEYS if isinstance(value := metadata.get(key), str)]
