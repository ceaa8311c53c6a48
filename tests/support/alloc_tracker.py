"""Peak of PyTorch's CPU allocator during a call: every real allocation, inside kernels too."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(call: Callable[[], object]) -> int:
    """The most bytes that `call` held at a time beyond what was allocated before it.

    Counts what goes through PyTorch's CPU allocator; scratch memory that oneDNN or MKL take from the system is
    not seen.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = call()
    del result
    results = profiler.profiler.kineto_results if profiler.profiler else None
    if results is None:
        raise RuntimeError("the profiler gave no results")
    changes = [(event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]"]
    if not changes:
        raise RuntimeError("the profiler saw no allocation")
    held = peak = 0
    for _, nbytes in sorted(changes, key=lambda change: change[0]):
        held += nbytes
        peak = max(peak, held)
    return peak
