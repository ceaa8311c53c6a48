"""What the memory probe does: a report and a chart of the prompt up to here."""

from __future__ import annotations

import torch
from comfy_execution.utils import get_executing_context

from ...src.wanfit.memory.chart import draw
from . import snapshot
from .picture import image_of
from .prompt_record import RECORDER


def measure(label: str) -> tuple[str, torch.Tensor]:
    """End the stage that ran since the prompt's start or its last probe.

    Returns: the report, and the chart (1, H, W, 3) in 0 to 1.
    """
    context = get_executing_context()
    session = RECORDER.session(context.prompt_id if context is not None else "")
    session.end_stage(label)
    report = f"{label}: {snapshot.take().line()}\n\n{session.record.table()}"
    report = "\n".join([report, *session.record.notes()])
    chart = image_of(lambda path: draw(session.record, path, f"Memory up to {label}"))
    session.begin_stage()
    return report, chart
