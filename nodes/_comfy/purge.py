"""What the purge node does."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import comfy.model_management
from server import PromptServer

from . import snapshot
from .runtime import RUNTIMES


def release(thing: Any, what: str) -> str:
    """Release `what`, and say what that changed. `thing` is what passes through the node."""
    before = snapshot.take()
    note = _ACTIONS[what](thing)
    gc.collect()
    comfy.model_management.soft_empty_cache(True)
    after = snapshot.take()
    return f"{what}: {note}\nbefore: {before.line()}\nafter:  {after.line()}"


def _this_model(thing: Any) -> str:
    patcher = getattr(thing, "patcher", thing)
    if not hasattr(patcher, "is_clone"):
        return f"the input is a {type(thing).__name__}, not a MODEL, CLIP or VAE; nothing to release"
    loaded = comfy.model_management.current_loaded_models
    mine = [i for i, entry in enumerate(loaded) if entry.model is not None and patcher.is_clone(entry.model)]
    for index in reversed(mine):
        loaded.pop(index).model_unload()
    runtime = getattr(patcher.model, "wanfit_runtime", None)
    if runtime is not None:
        runtime.release()
    return f"{type(patcher.model).__name__} " + ("left the device" if mine else "was not on the device")


def _all_models(_: Any) -> str:
    count = len(comfy.model_management.current_loaded_models)
    comfy.model_management.unload_all_models()
    for runtime in list(RUNTIMES):
        runtime.release()
    return f"{count} loaded models unloaded"


def _device_cache(_: Any) -> str:
    return "memory that PyTorch held unused was returned"


def _host_cache(_: Any) -> str:
    freed = sum(runtime.release_host() for runtime in list(RUNTIMES))
    return f"{freed / 2**30:.2f} GiB of block copies in RAM given back"


def _node_cache(_: Any) -> str:
    PromptServer.instance.prompt_queue.set_flag("free_memory", True)
    return "ComfyUI will drop all cached results when this prompt has ended (not visible in the figures below)"


_ACTIONS: Mapping[str, Callable[[Any], str]] = {
    "this model": _this_model,
    "all models": _all_models,
    "device cache": _device_cache,
    "host cache": _host_cache,
    "node cache": _node_cache,
}
