"""Read-only memory maps of model files and tensor views of them."""

from __future__ import annotations

import mmap
import warnings
from pathlib import Path

import torch

from ..errors import CheckpointError


class MappedFile:
    """A model file mapped read-only: pages come from disk when they are touched, and nothing is copied.

    The map is not a private writable one on purpose: Windows charges such a map in full against the paging
    file, and Linux may refuse one that is larger than memory.

    Args:
        path: an existing file.

    Raises:
        CheckpointError: file_damaged for an empty file, file_unreadable when the system refuses to open it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size, self._map = 0, None
        try:
            with path.open("rb") as file:
                self.size = file.seek(0, 2)
                if self.size:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise CheckpointError(
                "file_unreadable",
                "inspect",
                f"{path} cannot be opened: {error.strerror or error}",
                "Check the permissions, and that no other program holds the file",
            ) from error
        if self._map is None:
            raise CheckpointError("file_damaged", "inspect", f"{path} is empty (0 bytes)", "Download it again")
        with warnings.catch_warnings():
            # torch warns once a process that the map is not writable; StoredWeight is read-only by contract.
            warnings.filterwarnings("ignore", message="The given buffer is not writable")
            self._bytes: torch.Tensor | None = torch.frombuffer(self._map, dtype=torch.uint8)

    def read(self, offset: int, nbytes: int) -> bytes:
        """A copy of a few bytes; shorter at the end of the file."""
        return self._view(offset, nbytes).numpy().tobytes()

    def tensor(self, offset: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of the map, which stays mapped as long as the view lives. It must not be written to.

        Memory: none; a tensor that starts at an address its dtype cannot be read from is copied.

        Raises:
            ValueError: after `close`.
        """
        data = self._view(offset, nbytes)
        if offset % dtype.itemsize:
            data = data.clone()
        return data.view(dtype).view(shape)

    def forget(self, offset: int, nbytes: int) -> None:
        """Take these pages out of the process's memory: what is needed again comes from the system's cache or disk.

        Views stay valid. Linux and macOS; elsewhere the system drops pages of its own accord, when memory is short.
        """
        if self._map is not None and hasattr(mmap, "MADV_DONTNEED"):
            start = offset // mmap.PAGESIZE * mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, min(offset + nbytes, self.size) - start)

    def _view(self, offset: int, nbytes: int) -> torch.Tensor:
        if self._bytes is None:
            raise ValueError(f"{self.path} is closed")
        return self._bytes[offset : offset + nbytes]

    def close(self) -> None:
        """Give up the map. Views handed out keep it (and, on Windows, the file) until they are gone.

        The map itself is never closed by hand: torch's views do not protect it, so that would leave them
        pointing at unmapped memory.
        """
        self._bytes = self._map = None
