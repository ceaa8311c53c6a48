"""What the purge node does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import comfy.model_management
from server import PromptServer

from ...src.wanfit.memory.release import purge, take_snapshot
from ...src.wanfit.offload import BlockStore
from . import checks, snapshot
from .runtime import RUNTIMES


def release(thing: Any, what: str) -> str:
    """Release `what`, and say what that changed. `thing` is what passes through the node."""
    checks.one_of("release", what, _ACTIONS)
    device = comfy.model_management.get_torch_device()
    before, counters = snapshot.take(), take_snapshot(device)
    note = _ACTIONS[what](thing)
    scopes = ["device cache", "host cache"] if what in ("all models", "host cache") else ["device cache"]
    report = replace(purge(device, scopes, _holders()), before=counters)
    comfy.model_management.soft_empty_cache(True)  # of devices that the engine does not know
    after = snapshot.take()
    lines = [f"{what}: {note}", f"before: {before.line()}", f"after:  {after.line()}", *report.lines()]
    return "\n".join(lines)


def _holders() -> dict[str, BlockStore]:
    """What holds blocks, by the names of its files; experts share one."""
    names: dict[int, list[str]] = {}
    stores: dict[int, BlockStore] = {}
    for runtime in list(RUNTIMES):
        store = runtime.placement.store
        if store is not None:
            stores[id(store)] = store
            names.setdefault(id(store), []).append(runtime.checkpoint.path.name)
    return {", ".join(sorted(names[key])): store for key, store in stores.items()}


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
