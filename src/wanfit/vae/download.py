"""Copies results to the host while the device goes on."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch


class Download:
    """Delivers tensors on the host, in order. From CUDA through two pinned buffers, one copy behind.

    Args:
        deliver: gets each tensor on the host, valid during the call only, and the number it was put with.
    """

    def __init__(self, deliver: Callable[[torch.Tensor, int], None]) -> None:
        self._deliver = deliver
        self._free: list[torch.Tensor] = []
        self._flying: deque[tuple[torch.Tensor, torch.Tensor, torch.cuda.Event, int]] = deque()

    def put(self, tensor: torch.Tensor, number: int) -> None:
        if tensor.device.type != "cuda":
            self._deliver(tensor.cpu(), number)
            return
        nbytes = tensor.numel() * tensor.element_size()
        buffer = self._free.pop() if self._free else torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < nbytes:
            buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        view = buffer[:nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._flying.append((buffer, view, event, number))
        if len(self._flying) > 1:
            self._land()

    def flush(self) -> None:
        """Delivers what is still on its way."""
        while self._flying:
            self._land()

    def _land(self) -> None:
        buffer, view, event, number = self._flying.popleft()
        event.synchronize()
        self._deliver(view, number)
        self._free.append(buffer)
