"""What the host has left: the system's word, control groups, and on Windows what RAM and page file still promise."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")
PROC = Path("/proc")


@dataclass(frozen=True)
class GroupLimit:
    """A control group that bounds this process. Bytes; `used` includes page cache, `cache` is that part."""

    path: Path
    limit: int
    used: int
    cache: int

    @property
    def room(self) -> int:
        """What can still be taken; the system gives page cache back when room is needed."""
        return max(0, self.limit - self.used + self.cache)


def available_bytes() -> int:
    """Host memory that can be taken without swapping; a container's limit (cgroup v1 and v2) is respected."""
    return _available(group_limits())


class HostRoom:
    """`available_bytes` for one who asks often: which control groups have a limit is found out once."""

    def __init__(self) -> None:
        limits = group_limits()
        self._groups = [limit.path for limit in limits]
        self.installed = min([psutil.virtual_memory().total, *(limit.limit for limit in limits)])
        """Bytes of RAM, or of the smallest limit."""

    def available(self) -> int:
        return _available([limit for group in self._groups if (limit := _limit(group)) is not None])


def _available(limits: Iterable[GroupLimit]) -> int:
    return min([psutil.virtual_memory().available, *(limit.room for limit in limits)])


def group_limits(root: Path = CGROUP, proc: Path = PROC) -> list[GroupLimit]:
    """The control groups with a memory limit that this process is in, from its own up to the root."""
    return [found for folder in _groups(root, proc) if (found := _limit(folder)) is not None]


def commit_room() -> int | None:
    """Bytes that the system still promises to this program; None where it sets no such limit.

    Windows: the commit limit (RAM and page file). Elsewhere: a limit of its address space (`ulimit -v`), and on Linux
    what is left to all programs where overcommitting is switched off.
    """
    if sys.platform == "win32":
        return _windows_commit()
    rooms = [room for room in (_linux_commit(PROC), _address_room()) if room is not None]
    return min(rooms, default=None)


def swap_in_use() -> tuple[int, int] | None:
    """(used, total) of swap or page file, bytes; None where Windows' performance counters are switched off."""
    try:
        swap = psutil.swap_memory()
    except (RuntimeError, OSError):
        return None
    return swap.used, swap.total


def in_wsl(proc: Path = PROC) -> bool:
    """Whether this Linux runs inside WSL, which gives it half of the RAM unless told otherwise."""
    text = _text(proc / "version")
    return text is not None and "microsoft" in text.lower()


def _groups(root: Path, proc: Path) -> Iterator[Path]:
    own = {root, root / "memory"}
    for line in (_text(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, place = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            base = root if controllers == "" else root / "memory"
            parts = [part for part in place.split("/") if part not in ("", "..")]
            own |= {base.joinpath(*parts[: index + 1]) for index in range(len(parts))}
    yield from sorted(own, key=lambda folder: -len(folder.parts))


def _limit(folder: Path) -> GroupLimit | None:
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_cache"),
    ):
        limit, used = (_number(folder / name) for name in (limit_name, used_name))
        if limit is not None and used is not None and limit < psutil.virtual_memory().total:
            return GroupLimit(folder, limit, used, _statistic(folder / "memory.stat", cache_name))
    return None


def _statistic(path: Path, name: str) -> int:
    lines = (line.split() for line in (_text(path) or "").splitlines())
    return next((int(words[1]) for words in lines if len(words) == 2 and words[0] == name), 0)


def _number(path: Path) -> int | None:
    text = (_text(path) or "").strip()
    return int(text) if text.isdigit() else None  # no such group, or the word `max`: no limit


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def _linux_commit(proc: Path) -> int | None:
    if (_text(proc / "sys" / "vm" / "overcommit_memory") or "").strip() != "2":
        return None
    values: dict[str, int] = {}
    for line in (_text(proc / "meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        if name in ("CommitLimit", "Committed_AS"):
            values[name] = int(rest.split()[0]) * 1024
    return max(0, values["CommitLimit"] - values["Committed_AS"]) if len(values) == 2 else None


def _address_room() -> int | None:
    import resource  # not on Windows

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    return max(0, limit - psutil.Process().memory_info().vms)


def _windows_commit() -> int | None:
    class Status(ctypes.Structure):
        """MEMORYSTATUSEX."""

        _fields_ = [
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            *((name, ctypes.c_uint64) for name in ("total", "free", "limit", "room", "v_total", "v_free", "v_more")),
        ]  # fmt: skip

    status = Status(length=ctypes.sizeof(Status))
    library = getattr(ctypes, "windll").kernel32  # noqa: B009 - exists on Windows only
    return int(status.room) if library.GlobalMemoryStatusEx(ctypes.byref(status)) else None
