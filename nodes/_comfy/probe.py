"""What the memory probe does: one record a prompt, one stage from probe to probe."""

from __future__ import annotations

import threading
from pathlib import Path
from tempfile import TemporaryDirectory

import comfy.model_management
import numpy as np
import torch
from comfy_execution.utils import get_executing_context
from PIL import Image
from server import PromptServer

from ...src.wanfit.memory.chart import draw
from ...src.wanfit.memory.record import MemoryRecord
from . import snapshot

_IDLE_CHECK_S = 1.0


class _Session:
    """The record of one prompt; its sampling ends with the prompt."""

    def __init__(self, prompt_id: str) -> None:
        self.prompt_id = prompt_id
        self.record = MemoryRecord(comfy.model_management.get_torch_device())
        self.closed = threading.Event()
        self.record.__enter__()
        threading.Thread(target=self._close_when_idle, name="wanfit-probe", daemon=True).start()

    def close(self) -> None:
        if not self.closed.is_set():
            self.closed.set()
            self.record.__exit__(None, None, None)

    def _close_when_idle(self) -> None:
        while not self.closed.wait(_IDLE_CHECK_S):
            if PromptServer.instance.prompt_queue.get_tasks_remaining() == 0:
                self.close()


_session: _Session | None = None


def measure(label: str) -> tuple[str, torch.Tensor]:
    """End the stage that ran since the last probe of this prompt, and begin the next.

    Returns: the report, and the chart (1, H, W, 3) in 0 to 1.
    """
    global _session
    context = get_executing_context()
    prompt_id = context.prompt_id if context is not None else ""
    first = _session is None or _session.prompt_id != prompt_id or _session.closed.is_set()
    if first:
        if _session is not None:
            _session.close()
        _session = _Session(prompt_id)
        _session.record.begin(label)
    assert _session is not None  # noqa: S101 - for the type checker
    record = _session.record
    record.end()
    record.stages[-1].name = label
    now = f"{label}: {snapshot.take().line()}"
    note = "\nRecording starts here: the next probe reports the peak of what runs until then." if first else ""
    report = f"{now}{note}\n\n{record.table()}"
    chart = _chart(record, label)
    record.begin("after " + label)
    return report, chart


def _chart(record: MemoryRecord, label: str) -> torch.Tensor:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "chart.png"
        draw(record, path, f"Memory up to {label}")
        pixels = np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(pixels)[None]
