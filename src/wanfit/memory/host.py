"""What the host has left: the system's word, and the limit of the control group that the process runs in."""

from __future__ import annotations

from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Host memory that can be taken without swapping; a container's limit is respected (cgroup v2)."""
    return min([psutil.virtual_memory().available, *_cgroup_room()])


def _cgroup_room() -> list[int]:
    limit, used = (_number(_CGROUP / name) for name in ("memory.max", "memory.current"))
    if limit is None or used is None:
        return []
    return [max(0, limit - used + (_file_pages() or 0))]


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such group, or the word `max`: no limit
        return None


def _file_pages() -> int | None:
    """Bytes of the group's page cache, which the system takes back when room is needed."""
    try:
        lines = (_CGROUP / "memory.stat").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("file ")), None)
