"""PyTorch's allocator settings as they take effect: which variable counts, what is ignored, what is wrong."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

NEW, OLD = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"

_SWITCHES = frozenset(
    {"expandable_segments", "pinned_use_background_threads", "pinned_free_catch_all", "throw_on_cudamalloc_oom",
     "release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "pinned_use_cuda_host_register",
     "pinned_use_hip_host_register", "graph_capture_record_stream_reuse"}
)  # fmt: skip
_NUMBERS = frozenset(
    {"max_split_size_mb", "garbage_collection_threshold", "max_non_split_rounding_mb", "large_segment_size_mb",
     "per_process_memory_fraction", "pinned_num_register_threads", "pinned_reserve_segment_size_mb",
     "pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"}
)  # fmt: skip
_OTHERS = frozenset({"backend", "roundup_power2_divisions"})
_BACKENDS = ("native", "cudaMallocAsync")
_NOT_ASYNC = ("max_split_size_mb", "roundup_power2_divisions", "garbage_collection_threshold", "expandable_segments")


@dataclass(frozen=True)
class Finding:
    """One word about the machine or its settings.

    Args:
        topic: `allocator`, `kernels` ...
        state: `ok`, `note`, `warning`, `wrong`, or `unread` for what this machine does not tell.
    """

    topic: str
    state: str
    text: str


def check_allocator(environment: Mapping[str, str], torch_version: str, platform: str) -> list[Finding]:
    """What the two variables set, and what of it has an effect.

    Args:
        platform: as `sys.platform`.

    Source: PyTorch's issues 183387 and 134338; keys and limits are those of torch 2.13 (c10/core/AllocatorConfig.h,
    c10/cuda/CUDAAllocatorConfig.h).
    """
    release = _release(torch_version)
    findings: list[Finding] = []
    new, old = environment.get(NEW, ""), environment.get(OLD, "")
    if not new and not old:
        return [Finding("allocator", "ok", f"{NEW} and {OLD} are not set: PyTorch's own settings")]
    if new and release < (2, 8):
        findings.append(_warn(f"torch {torch_version} does not read {NEW}; use {OLD}"))
        new = ""
    if new and old and new != old:
        findings.append(_warn(f"both variables are set; {NEW} counts where PyTorch knows it: unset {OLD}"))
    if old and not new and (2, 8) <= release < (2, 12):
        findings.append(Finding("allocator", "note", f"{OLD} is the old name; torch {torch_version} warns about it"))
    name, text = (NEW, new) if new else (OLD, old)
    if not text:
        return findings
    settings, malformed = _parse(text)
    findings += [
        Finding("allocator", "wrong", f"{name}: {part!r} is no `key:value`; torch rejects it") for part in malformed
    ]
    for key, value in settings.items():
        findings.append(_setting(name, key, value, settings, release, torch_version, platform))
    if settings.get("backend") == "cudaMallocAsync":
        ignored = [key for key in _NOT_ASYNC if key in settings]
        if ignored:
            findings.append(_warn(f"with the backend cudaMallocAsync PyTorch ignores {', '.join(ignored)}"))
    return findings


def _setting(
    name: str, key: str, value: str, all_of: Mapping[str, str], release: tuple[int, int], version: str, platform: str
) -> Finding:
    problem = _problem(key, value)
    if problem:
        return Finding("allocator", "wrong", f"{name}: {problem}")
    if key == "expandable_segments" and value == "True":
        if not platform.startswith("linux"):
            return _warn("expandable_segments has no effect on this system: it works on Linux only")
        if name == NEW and release == (2, 9):
            return _warn(f"torch {version} ignores expandable_segments in {NEW} for CUDA; put it into {OLD}")
        return Finding(
            "allocator",
            "ok",
            "expandable_segments: on; it helps against fragmentation and adds no memory"
            + ("; ComfyUI removes it from this variable and uses cudaMallocAsync" if name == OLD else ""),
        )
    if key == "max_split_size_mb" and all_of.get("expandable_segments") == "True":
        return _warn("max_split_size_mb does not govern expandable segments; leave one of the two out")
    if key == "garbage_collection_threshold":
        return Finding("allocator", "note", f"{key}: {value}; of use only with a memory fraction set for this process")
    return Finding("allocator", "ok", f"{key}: {value}")


def _problem(key: str, value: str) -> str:
    """Why torch rejects a value; empty when it does not."""
    if key in _SWITCHES:
        return "" if value in ("True", "False") else f"{key} is {value!r}: write True or False, with a capital"
    if key == "backend":
        return "" if value in _BACKENDS else f"backend is {value!r}: write {' or '.join(_BACKENDS)}"
    if key == "roundup_power2_divisions":
        numbers = [int(number) for number in re.findall(r"(?:^|:)(\d+)", value)]
        wrong = not numbers or any(number & (number - 1) for number in numbers)
        return f"{key} is {value!r}: divisions must be powers of two" if wrong else ""
    if key not in _NUMBERS:
        known = ", ".join(sorted(_SWITCHES | _NUMBERS | _OTHERS))
        return f"{key!r} is not known and CUDA builds of torch reject it; known are {known}"
    try:
        number = float(value)
    except ValueError:
        return f"{key} is {value!r}, which is no number"
    if key == "max_split_size_mb" and not number >= 20:
        return f"{key} is {value}: write 20 or more"
    if key in ("garbage_collection_threshold", "per_process_memory_fraction") and not 0 < number < 1.0000001:
        return f"{key} is {value}: write a number between 0 and 1"
    return ""


def _parse(text: str) -> tuple[dict[str, str], list[str]]:
    """Keys with values, and what is no pair. Brackets hold commas: `roundup_power2_divisions:[256:1,512:2]`."""
    settings: dict[str, str] = {}
    malformed: list[str] = []
    for part in re.split(r",(?![^\[]*\])", text.replace(" ", "")):
        key, colon, value = part.partition(":")
        if not (key and colon and value):
            malformed.append(part)
        else:
            settings[key] = value
    return settings, malformed


def _release(version: str) -> tuple[int, int]:
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _warn(text: str) -> Finding:
    return Finding("allocator", "warning", text)
