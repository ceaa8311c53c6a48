"""Tensors that wait on the host: in pinned memory up to a limit, then in a temporary file."""

from __future__ import annotations

import tempfile
from collections.abc import Hashable
from pathlib import Path
from types import TracebackType
from typing import IO

import torch

from ..errors import OutputError

HOST_BYTES = 512 * 1024**2
"""Host memory for waiting features, half of it for waiting frames; what is more goes to a temporary file."""

_SLAB = 64 * 1024**2
"""Host memory is taken in pieces of this size: pinned memory of odd sizes is rounded up to a power of two."""


def waiting_bytes(nbytes: int, limit: int) -> int:
    """Host memory that a `Spool` of this limit takes for `nbytes`: whole slabs."""
    return min(-(-nbytes // _SLAB) * _SLAB, limit)


class Spool:
    """Tensors by key. A key that is stored again replaces the first tensor, which must have the same size.

    Args:
        limit_bytes: host memory to use; what comes after goes to an unnamed temporary file, written and read
            with plain file calls, so it does not count as memory of the process.
        directory: for that file; the system's folder for temporary files by default.
        pinned: memory that a GPU copies from and to by itself.
    """

    def __init__(self, limit_bytes: int, directory: Path | None = None, *, pinned: bool = False) -> None:
        self._limit, self._directory, self._pinned = limit_bytes, directory, pinned
        self._slabs: list[torch.Tensor] = []
        self._free = 0
        self._held = 0
        self._memory: dict[Hashable, torch.Tensor] = {}
        self._places: dict[Hashable, int] = {}
        self._file: IO[bytes] | None = None
        self._end = 0
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._copied: torch.cuda.Event | None = None

    @property
    def file_bytes(self) -> int:
        """Bytes written to the temporary file so far."""
        return self._end

    def __enter__(self) -> Spool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forgets everything; the temporary file is gone."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._memory.clear()
        self._places.clear()
        self._slabs.clear()

    def store(self, key: Hashable, tensor: torch.Tensor) -> None:
        """Copies `tensor`, from any device.

        Raises: OutputError output_unwritable: the disk is full, or the folder cannot be written.
        """
        nbytes = tensor.numel() * tensor.element_size()
        if key not in self._places:
            place = self._memory.get(key)
            if place is None:
                place = self._take(nbytes)
            if place is not None:
                self._memory[key] = place
                place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=self._pinned)
                return
        buffer = self._staging(nbytes)
        buffer.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        self._write(self._places.get(key, self._end), key, buffer)

    def load(self, key: Hashable, out: torch.Tensor) -> None:
        """Copies the tensor of `key` into `out`, which has its shape and dtype, on any device."""
        held = self._memory.get(key)
        if held is not None:
            out.copy_(held.view(out.dtype).view(out.shape), non_blocking=self._pinned)
            return
        buffer = self._staging(out.numel() * out.element_size())
        self._read(self._places[key], buffer)
        out.copy_(buffer.view(out.dtype).view(out.shape), non_blocking=self._pinned)
        if self._pinned:
            self._copied = torch.cuda.Event()
            self._copied.record()

    def _take(self, nbytes: int) -> torch.Tensor | None:
        """Room for `nbytes` in host memory, or None beyond the limit."""
        aligned = -nbytes % 64 + nbytes
        if aligned > self._free:
            slab = max(_SLAB, aligned)
            if self._held + slab > self._limit:
                slab = self._limit - self._held
            if slab < aligned:
                return None
            self._slabs.append(torch.empty(slab, dtype=torch.uint8, pin_memory=self._pinned))
            self._held += slab
            self._free = slab
        start = self._slabs[-1].numel() - self._free
        self._free -= aligned
        return self._slabs[-1][start : start + nbytes]

    def _staging(self, nbytes: int) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
            self._copied = None
        if self._buffer.numel() < nbytes:
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        return self._buffer[:nbytes]

    def _write(self, place: int, key: Hashable, buffer: torch.Tensor) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory, prefix="wanfit-")  # noqa: SIM115
            self._file.seek(place)
            self._file.write(buffer.numpy().data)
        except OSError as error:
            folder = self._directory or Path(tempfile.gettempdir())
            raise OutputError(
                "output_unwritable",
                "decode",
                f"The temporary file in {folder} could not be written after {self._end / 1024**3:.2f} GiB: {error}",
                "Free space there, or choose another <spool_directory>",
            ) from error
        self._places[key] = place
        self._end = max(self._end, place + buffer.numel())

    def _read(self, place: int, buffer: torch.Tensor) -> None:
        if self._file is None:
            raise LookupError("nothing was written to the temporary file")
        self._file.seek(place)
        if self._file.readinto(buffer.numpy().data) != buffer.numel():  # pyright: ignore[reportAttributeAccessIssue]
            raise OutputError(
                "output_unwritable", "decode", "The temporary file was cut short", "Free space and run again"
            )
