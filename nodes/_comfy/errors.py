"""Engine errors in the words of the graph, and other failures with their cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import comfy.model_management
import torch

from ...src.wanfit.errors import RunError, WanFitError
from ...src.wanfit.memory.explain import explain
from ...src.wanfit.memory.facts import gather

_NODES = {"plan": "the node WanFit Plan", "doctor": "the node WanFit Doctor", "vram_used": "vram"}
"""What the command line's commands are called here."""


class NodeError(Exception):
    """An error as the user of a node sees it: its text names the node's own inputs."""


class OutOfMemory(NodeError, torch.OutOfMemoryError):
    """The same where device memory was full: ComfyUI unloads all models then, as for PyTorch's own error."""


@contextmanager
def in_words_of(names: Mapping[str, str], stage: str = "input") -> Iterator[None]:
    """Raise engine errors of the `with` body, and failures whose cause is known, as NodeError.

    Args:
        names: maps `num_frames` to `length` ...
        stage: that fails where the failure itself does not say.
    """
    try:
        with explained(stage):
            yield
    except WanFitError as error:
        kind = OutOfMemory if isinstance(error.__cause__, torch.OutOfMemoryError) else NodeError
        raise kind(error.render({**_NODES, **names})) from error


@contextmanager
def explained(stage: str) -> Iterator[None]:
    """Turn a failure whose cause is known into one sentence; others pass.

    Raises: RunError: run_failed.
    """
    try:
        yield
    except NodeError:
        raise
    except (RuntimeError, MemoryError, OSError, EOFError) as error:
        found = explain(error, gather(comfy.model_management.get_torch_device(), torch.bfloat16, stage=stage))
        if found is None:
            raise
        raise RunError("run_failed", stage, found.what, found.change) from error
