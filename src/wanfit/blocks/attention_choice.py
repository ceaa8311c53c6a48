"""Which attention back end is the fastest on this card, for this shape: one short measurement, remembered."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from .attention import AttentionBackend, sdpa

EXACT = 1e-2
"""Relative error up to which `auto` takes a back end; kernels that round to 8 bits are taken by name only."""

_QUERIES, _MOST_TOKENS, _HEADS, _REPEATS = 256, 16384, 2, 3


@dataclass(frozen=True)
class Measured:
    """One back end: seconds for the measured shape, error against float32; or why it does not run."""

    name: str
    seconds: float = float("inf")
    error: float = float("inf")
    refusal: str = ""


@dataclass(frozen=True)
class Choice:
    """The back end that `auto` takes, and all that were tried."""

    name: str
    backend: AttentionBackend
    measured: tuple[Measured, ...]


def _heads_first(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


def _sdpa_with(kind: SDPBackend) -> AttentionBackend:
    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(kind):
            return _heads_first(q, k, v)

    return attention


def _sage() -> AttentionBackend:
    function: Callable[..., Any] = importlib.import_module("sageattention").sageattn
    return lambda q, k, v: function(q, k, v, tensor_layout="NHD")


def _xformers() -> AttentionBackend:
    return importlib.import_module("xformers.ops").memory_efficient_attention


def backends() -> Mapping[str, AttentionBackend]:
    """All that can be imported here, by name."""
    found = {
        name.removesuffix("_ATTENTION").lower(): _sdpa_with(getattr(SDPBackend, name))
        for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
        if hasattr(SDPBackend, name)
    }
    for module, make in (("sageattention", _sage), ("xformers", _xformers)):
        if importlib.util.find_spec(module) is not None:
            found[module] = make()
    return found


@functools.lru_cache(maxsize=32)
def choose_attention(device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int) -> Choice:
    """Measure all back ends on `tokens` tokens (16,384 at most) of two heads; about 0.1 s on a GPU.

    On the CPU nothing is measured: there PyTorch has one kernel.
    """
    if device.type != "cuda":
        return Choice("sdpa", sdpa, ())
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, min(tokens, _MOST_TOKENS), _HEADS, head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3))
    expected = _heads_first(q[:, :_QUERIES].float(), k.float(), v.float())
    found = backends()
    measured = tuple(_measure(name, backend, (q, k, v), expected) for name, backend in found.items())
    best = min((m for m in measured if m.error <= EXACT), key=lambda m: m.seconds, default=None)
    if best is None:
        return Choice("sdpa", sdpa, measured)
    return Choice(best.name, found[best.name], measured)


def _measure(name: str, backend: AttentionBackend, given: tuple[torch.Tensor, ...], expected: torch.Tensor) -> Measured:
    try:
        actual = backend(*given)[:, :_QUERIES].float()
        error = float((actual - expected).norm() / expected.norm())
        times: list[float] = []
        for _ in range(_REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            backend(*given)
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as reason:  # noqa: BLE001  other people's kernels, compiled here and now
        return Measured(name, refusal=f"{type(reason).__name__}: {str(reason)[:120]}")
    return Measured(name, min(times), error)
