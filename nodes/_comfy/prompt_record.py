"""Memory records of prompts that hold a probe: from the prompt's start to its end."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import comfy.model_management
from server import PromptServer

from ...src.wanfit.memory.record import MemoryRecord, PlannedPeak

NODE = "WanFitMemoryProbe"
_POLL_S = 0.02


class Session:
    """The record of one prompt; a stage is open from the start and after each probe."""

    def __init__(self, prompt_id: str) -> None:
        self.prompt_id = prompt_id
        self.record = MemoryRecord(comfy.model_management.get_torch_device())
        self.record.__enter__()
        self.record.begin("start")

    def end_stage(self, label: str) -> None:
        """Close the open stage under this name, and open the next."""
        self.record.end()
        self.record.stages[-1].name = label

    def begin_stage(self) -> None:
        self.record.begin("rest")

    def close(self) -> None:
        self.record.__exit__(None, None, None)


class Recorder:
    """Watches the queue while there is work in it, from a thread that ends with the work."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._watching = False

    def register(self) -> None:
        """Be told of every queued prompt."""
        PromptServer.instance.add_on_prompt_handler(self._on_prompt)

    def session(self, prompt_id: str) -> Session:
        """The session of a running prompt; begun now when it was not seen before."""
        with self._lock:
            return self._begin(prompt_id)

    def expect(self, planned: PlannedPeak) -> None:
        """A node is about to need this much: drawn beside what is measured. Nothing happens without a probe."""
        with self._lock:
            if self._session is not None:
                self._session.record.expect(planned)

    def _begin(self, prompt_id: str) -> Session:
        if self._session is None or self._session.prompt_id != prompt_id:
            self._end()
            self._session = Session(prompt_id)
        self._watch()
        return self._session

    def _end(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def _on_prompt(self, data: dict[str, Any]) -> dict[str, Any]:
        if _has_probe(data.get("prompt")):
            with self._lock:
                self._watch()
        return data

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            threading.Thread(target=self._follow_queue, name="wanfit-probe", daemon=True).start()

    def _follow_queue(self) -> None:
        queue = PromptServer.instance.prompt_queue
        idle = 0
        while idle < 50:  # a second: a prompt is queued a moment after its handler was called
            threading.Event().wait(_POLL_S)
            running = list(queue.currently_running.values())
            with self._lock:
                if running and _has_probe(running[0][2]):
                    self._begin(running[0][1])
                elif self._session is not None:
                    self._end()
            idle = 0 if running or queue.get_tasks_remaining() else idle + 1
        with self._lock:
            self._end()
            self._watching = False


def _has_probe(prompt: Any) -> bool:
    return isinstance(prompt, Mapping) and any(
        isinstance(node, Mapping) and node.get("class_type") == NODE for node in prompt.values()
    )


RECORDER = Recorder()
