"""From an exception and a few counters to one cause and one next step. A pure function: it reads nothing."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Sequence

import torch

from .explain_wrong import allocator_settings, channels, devices, float8_kernel, odd_size
from .explanation import Explanation, Facts
from .oom_text import OomFigures, read_async, read_native

GIB = 2**30

LARGE = 0.1
"""Of a card's memory: more than this taken by others is what a failure is put down to."""

SPARE = 1 / 8
"""Of what the program may use. Memory is called fragmented where the unused pieces together would have held the request
and left this much over. With less to spare it is full for all that matters: the next request would have failed anyway,
and what helps is to need less."""

PLENTY = 8 * GIB
"""Of RAM and of what the system still promises: with so much left neither refuses a request."""

_SMALLER_TEXT = "Set <text> to cpu, or use a smaller text encoder file (fp8, Q4_K_M)"

PAGEFILE_TOO_SMALL = 1455
"""Windows: ERROR_COMMITMENT_LIMIT."""


def explain(error: BaseException, facts: Facts | None = None) -> Explanation | None:
    """The cause of an exception, or None when it is not one that this function knows.

    The first error counts: where `error` was raised while another one was handled (a pipe that broke because a
    worker had run out of memory), that one is explained.

    Source: tests/unit/memory/test_explain.py quotes each message with its origin.
    """
    facts = facts or Facts()
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    for link in reversed(chain):
        for rule in _RULES:
            found = rule(link, str(link), facts)
            if found is not None:
                return found
    return None


def _out_of_memory(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    asynchronous = text.startswith("Allocation on device") and "exceed allowed memory" in text
    if not (isinstance(error, torch.OutOfMemoryError) or asynchronous or text.startswith("CUDA out of memory")):
        return None
    figures = read_async(text) if asynchronous else read_native(text)
    at = f" in the stage {facts.stage}" if facts.stage else ""
    asked = _gib(figures.asked) if figures.asked is not None else "more memory"
    free = figures.free if figures.free is not None else facts.vram_free
    total = figures.total if figures.total is not None else facts.vram_total
    if (
        figures.asked is not None
        and free is not None
        and figures.allowed is None
        and free >= 1.1 * figures.asked + 2**26
    ):
        ram = "" if facts.ram_free is None else f" ({_gib(facts.ram_free)} of RAM are left)"
        if facts.ram_free is not None and min(facts.ram_free, facts.commit_free or facts.ram_free) >= PLENTY:
            return Explanation(
                "earlier CUDA error",
                f"The device refused {asked}{at} with {_gib(free)} of its memory free{ram}: nothing is short; mostly a "
                "kernel failed before, such as an attention kernel that was compiled for another torch",
                "Set <attention> to sdpa, and see what <doctor> says of versions",
            )
        return Explanation(
            "host memory full",
            f"The device refused {asked}{at} with {_gib(free)} of its memory free: what is full is RAM, pinned memory "
            f"or the page file{ram}",
            _host_advice(facts),
        )
    usable = figures.allowed or total
    unused = figures.unused or 0
    if usable is not None and figures.asked is not None and unused >= figures.asked + SPARE * usable:
        return Explanation(
            "fragmentation",
            f"{asked} were not to be had in one piece{at}: PyTorch holds {_gib(unused)} unused in smaller pieces",
            "Start the program again, or set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True before it starts "
            "(Linux only)",
        )
    others = sum(used for _, used in figures.others) or sum(used for *_, used in facts.others)
    if not others and None not in (total, free, figures.in_use):
        others = max(0, (total or 0) - (free or 0) - (figures.in_use or 0))
    own = figures.in_use if figures.in_use is not None else figures.allocated or 0
    enough = total is not None and own + (figures.asked or 0) <= total  # if the others were gone
    if total is not None and figures.allowed is None and others >= LARGE * total and enough:
        return Explanation(
            "another process",
            f"Other programs hold {_gib(others)} of the card's {_gib(total)}{_names(figures, facts)}, and {asked} more "
            f"were needed{at}",
            "Close them, or plan with what they leave (<plan>, <vram_used>)",
        )
    if facts.conv3d_trap and facts.stage.startswith(("decode", "encode")):
        return Explanation(
            "conv3d workspace",
            f"The VAE's 3D convolution asked for {asked}{at}, about three times what it needs: {facts.conv3d_trap}",
            "Install torch 2.9.1 or newer with cuDNN 9.15 or newer, or decode in smaller tiles",
        )
    left = "" if free is None else f", {_gib(free)}{'' if total is None else f' of {_gib(total)}'} were free"
    held = "" if figures.allocated is None else f", {_gib(figures.allocated)} are in use by tensors"
    if figures.asked is not None and unused >= figures.asked:
        held += f", {_gib(unused)} lie between them in pieces too small"
    planned = "" if facts.planned_vram is None else f"; the plan said {_gib(facts.planned_vram)} for this stage"
    limit = "" if figures.allowed is None else f" (this program may use {_gib(figures.allowed)})"
    return Explanation(
        "vram full",
        f"The device memory is full{at}: {asked} more were needed{left}{limit}{held}{planned}",
        _SMALLER_TEXT
        if facts.stage == "text"
        else "Use a smaller <width>, <height> or <num_frames>, or a smaller file; <plan> says what fits",
    )


def _runtime_out_of_memory(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    """CUDA's own error, not the allocator's: page-locking, a library or the driver had no room."""
    if "CUDA error: out of memory" not in text and "cudaErrorMemoryAllocation" not in text:
        return None
    if facts.vram_free is not None and facts.vram_free < GIB // 2:
        others = sum(used for *_, used in facts.others)
        if facts.vram_total is not None and others >= LARGE * facts.vram_total:
            return Explanation(
                "another process",
                f"CUDA itself found no room on the device: other programs hold {_gib(others)} of the card's "
                f"{_gib(facts.vram_total)}{_names(None, facts)}",
                "Close them",
            )
        return Explanation(
            "vram full",
            f"CUDA itself found no room on the device ({_gib(facts.vram_free)} free)",
            "Give the run a smaller <vram_budget>, so that libraries keep some room",
        )
    return Explanation(
        "host memory full",
        "CUDA could not page-lock host memory: RAM is full, or the system's limit for pinned memory is reached",
        _host_advice(facts),
    )


def _library(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    """cuBLAS and cuDNN take memory of their own, outside PyTorch's allocator; at the edge they get none."""
    found = re.search(
        r"(CUBLAS|CUDNN|CUSOLVER)_STATUS_(ALLOC_FAILED|NOT_INITIALIZED|INTERNAL_ERROR_DEVICE_ALLOC\w*)", text
    )
    if found is None:
        return None
    left = "" if facts.vram_free is None else f" ({_gib(facts.vram_free)} free)"
    at = f" in the stage {facts.stage}" if facts.stage else ""
    return Explanation(
        "vram full",
        f"{found[1].replace('CU', 'cu', 1)} found no room on the device for itself{at}{left}",
        "Give the run a smaller <vram_budget>, so that libraries keep some room",
    )


def _pagefile(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    if not (
        getattr(error, "winerror", None) == PAGEFILE_TOO_SMALL
        or "os error 1455" in text
        or "paging file is too small" in text
    ):
        return None
    return Explanation(
        "page file full",
        "Windows could not promise more memory: RAM and page file together are used up (error 1455)",
        "Let Windows manage the size of the page file, or make it as large as the model files of the run",
    )


def _host_memory(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    asked = re.search(r"you tried to allocate (\d+) bytes", text)
    refused = isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
    if not refused and not (asked and "DefaultCPUAllocator" in text):
        return None
    size = f"{_gib(int(asked[1]))} more were" if asked else "more was"
    left = "" if facts.ram_free is None else f", {_gib(facts.ram_free)} are free"
    at = f" in the stage {facts.stage}" if facts.stage else ""
    if facts.commit_free is not None and facts.ram_free is not None and facts.commit_free < facts.ram_free:
        return Explanation(
            "host memory full",
            f"RAM is full for this program{at}: {size} needed, and the system lets it take "
            f"{_gib(facts.commit_free)} more of the {_gib(facts.ram_free)} that are free; it is not VRAM",
            "Raise that limit (Windows: the page file; Linux: `ulimit -v`, or overcommitting), or give a smaller "
            "<ram_budget>",
        )
    return Explanation("host memory full", f"RAM is full{at}: {size} needed{left}; it is not VRAM", _host_advice(facts))


def _host_buffer(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    if "HostBuffer" not in text or "failed" not in text:
        return None
    version = f" (comfy-aimdo {facts.aimdo})" if facts.aimdo else ""
    return Explanation(
        "pinned memory",
        f"ComfyUI's own pinned memory failed while it read a model file{version}",
        "Start ComfyUI with --disable-pinned-memory",
    )


def _dead_child(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    if not isinstance(error, EOFError | BrokenPipeError | ConnectionResetError):
        return None
    return Explanation(
        "a worker died",
        f"A worker process ended without an answer ({type(error).__name__}); its own first error, mostly out of "
        "memory, is further up",
        "Look for the first error above; on Linux `dmesg` says whether the system killed it for memory",
    )


_Rule = Callable[[BaseException, str, Facts], Explanation | None]
_RULES: Sequence[_Rule] = (
    _out_of_memory,
    _runtime_out_of_memory,
    _library,
    _pagefile,
    _host_buffer,
    _host_memory,
    float8_kernel,
    channels,
    odd_size,
    allocator_settings,
    devices,
    _dead_child,
)


def _host_advice(facts: Facts) -> str:
    if facts.wsl:
        return "Raise `memory` in .wslconfig (WSL takes half of the RAM by default), or give a smaller <ram_budget>"
    return (
        "Close other programs, or give a smaller <ram_budget>; in ComfyUI start with --disable-pinned-memory, and with "
        "--cache-none where the results of nodes pile up from run to run"
    )


def _names(figures: OomFigures | None, facts: Facts) -> str:
    known = {pid: name for pid, name, _ in facts.others}
    pids = [pid for pid, _ in figures.others] if figures is not None and figures.others else list(known)
    if not pids:
        return ""
    return f" ({', '.join(f'{known[pid]} {pid}' if pid in known else f'process {pid}' for pid in pids[:3])})"


def _gib(nbytes: int) -> str:
    if nbytes < 2**20:
        return f"{nbytes} bytes"
    return f"{nbytes / GIB:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.0f} MiB"
