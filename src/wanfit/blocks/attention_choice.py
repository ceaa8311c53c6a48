"""Which attention back end a run takes: by name, or the fastest on this card, measured once and remembered."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import InputError
from .attention import FUSED, AttentionBackend, only, sdpa, sdpa_first

ATTENTION = ("auto", "sdpa", "cudnn", "flash", "efficient", "xformers", "sageattention", "comfy_kitchen")
"""Names that a user may give. `auto` and `sdpa` always work, the others where card and installation have them."""

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

    def __str__(self) -> str:
        return f"{self.name}: {self.refusal or f'{self.seconds * 1e3:.2f} ms, error {self.error:.1e}'}"


@dataclass(frozen=True)
class Choice:
    """The back end that is taken, all that were tried, and what the trying took."""

    name: str
    backend: AttentionBackend
    measured: tuple[Measured, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        tried = "; ".join(str(m) for m in self.measured)
        return f"{self.name} (measured in {self.seconds:.2f} s: {tried})" if tried else self.name


def _sage() -> AttentionBackend:
    function: Callable[..., Any] = importlib.import_module("sageattention").sageattn
    return lambda q, k, v: function(q, k, v, tensor_layout="NHD")


def _xformers() -> AttentionBackend:
    return importlib.import_module("xformers.ops").memory_efficient_attention


def _comfy_kitchen() -> AttentionBackend:
    function: Callable[..., Any] = importlib.import_module("comfy_kitchen").int8_attention
    return lambda q, k, v: function(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


_MODULES: Mapping[str, Callable[[], AttentionBackend]] = {
    "xformers": _xformers,
    "sageattention": _sage,
    "comfy_kitchen": _comfy_kitchen,
}


def choose_attention(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int) -> Choice:
    """The back end of that name, tried once; for `auto` the fastest that is exact.

    Measured on two heads, which is what a forward in chunks gives to one call of a large video, and on `tokens`
    tokens, 16,384 at most: what is longer takes the same one. Remembered for each card, dtype and such a shape.
    Begin before the weights are on the device. On the CPU PyTorch has one kernel and nothing is measured.

    Raises:
        InputError: attention_unavailable: no such name; it is not installed; or it refuses these tensors here.

    Memory: 0.2 GiB for a moment; where that is not to be had, `auto` is `sdpa`.
    """
    if name not in ATTENTION:
        raise InputError(
            "attention_unavailable", "input", f"<attention> is {name!r}", f"Use one of: {', '.join(ATTENTION)}"
        )
    if name == "sdpa" or (name == "auto" and device.type != "cuda"):
        return Choice("sdpa", sdpa)
    if device.type != "cuda":
        raise InputError(
            "attention_unavailable", "input", f"<attention> {name} needs a CUDA device", "Use auto or sdpa"
        )
    try:
        choice = _choose(name, device, dtype, head_dim, min(tokens, _MOST_TOKENS))
    except torch.cuda.OutOfMemoryError:
        if name != "auto":
            raise
        return Choice("sdpa", sdpa)
    refusal = choice.measured[0].refusal if choice.measured else ""
    if name != "auto" and refusal:
        raise InputError(
            "attention_unavailable",
            "input",
            f"<attention> {name} does not work on {torch.cuda.get_device_name(device)} in {dtype}: {refusal}",
            "Use auto",
        )
    return choice


@functools.lru_cache(maxsize=32)
def _choose(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, tokens: int) -> Choice:
    began = time.perf_counter()
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, tokens, _HEADS, head_dim)
    q, k, v = (torch.randn(shape, generator=generator, device=device).to(dtype) for _ in range(3))
    expected = sdpa(q[:, :_QUERIES].float(), k.float(), v.float())
    candidates = ATTENTION[2:] if name == "auto" else (name,)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch warns of each reason for which a kernel refuses
        measured = tuple(_measure(candidate, (q, k, v), expected) for candidate in candidates)
    ran = [m for m in measured if not m.refusal and (name != "auto" or m.error <= EXACT)]
    best = min(ran, key=lambda m: m.seconds, default=None)
    seconds = time.perf_counter() - began
    if best is None:
        return Choice("sdpa", sdpa, measured, seconds)
    backend = sdpa_first(best.name) if best.name in FUSED else _MODULES[best.name]()
    return Choice(best.name, backend, measured, seconds)


def _measure(name: str, given: tuple[torch.Tensor, ...], expected: torch.Tensor) -> Measured:
    if name not in FUSED and (name not in _MODULES or importlib.util.find_spec(name) is None):
        return Measured(name, refusal="not installed")
    try:
        backend = only(name) if name in FUSED else _MODULES[name]()
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
