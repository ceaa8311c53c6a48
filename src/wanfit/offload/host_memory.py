"""Host buffers that a device can read directly, where the system allows it."""

from __future__ import annotations

import weakref
from typing import Any

import torch

_PINNED: weakref.WeakSet[HostBuffer] = weakref.WeakSet()


def pinned_bytes() -> int:
    """Bytes of all buffers that are page-locked now."""
    return sum(buffer.nbytes for buffer in list(_PINNED))


class HostBuffer:
    """A uint8 buffer on the host, page-locked when asked for and possible.

    The memory is registered with CUDA in place: PyTorch's own pinned allocator rounds every request up to a power
    of two and keeps it after use. It goes back to the system with the last reference, or at `close`.

    Args:
        nbytes: size.
        pin_for: the CUDA device that will read it; None leaves the buffer pageable.

    Raises:
        MemoryError: the system has no room for it.
    """

    def __init__(self, nbytes: int, pin_for: torch.device | None) -> None:
        try:
            data = torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(f"{nbytes} bytes of host memory") from error
        if pin_for is not None:
            data.zero_()  # by all cores; registering alone would touch the pages one after another
        self._data: torch.Tensor | None = data
        self.nbytes = nbytes
        self.pinned = pin_for is not None and _register(data, pin_for)
        self._unregister = weakref.finalize(self, _unregister, data) if self.pinned else None
        if self._unregister is not None:
            self._unregister.atexit = False
            _PINNED.add(self)

    @property
    def data(self) -> torch.Tensor:
        if self._data is None:
            raise ValueError("the host buffer is closed")
        return self._data

    def close(self) -> None:
        """Give the memory back. No copy from it may be under way."""
        if self._unregister is not None:
            self._unregister()
            _PINNED.discard(self)
        self._data = None


def _runtime() -> Any:
    return torch.cuda.cudart()


def _register(data: torch.Tensor, device: torch.device) -> bool:
    status = _runtime().cudaHostRegister(data.data_ptr(), data.numel(), 0)
    if int(status) == 0:
        return True
    _clear_error(device)
    return False


def _unregister(data: torch.Tensor) -> None:
    _runtime().cudaHostUnregister(data.data_ptr())


def _clear_error(device: torch.device) -> None:
    """Let the failed registration's error surface here, not in the next kernel launch of someone else."""
    try:
        torch.zeros(1, device=device).add_(1)
        torch.cuda.synchronize(device)
    except torch.cuda.OutOfMemoryError:
        raise
    except RuntimeError:
        return
