"""PyTorch's attention kernels behind one protocol; `attention_choice` has the rest."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import InputError

_HAS_PRIORITY = "set_priority" in inspect.signature(sdpa_kernel).parameters

FUSED: Mapping[str, SDPBackend] = {
    name.removesuffix("_ATTENTION").lower(): getattr(SDPBackend, name)
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
    if hasattr(SDPBackend, name)
}
"""PyTorch's fused kernels by name, in the order in which they are preferred."""


class AttentionBackend(Protocol):
    """Full (unmasked) attention.

    q is (B, Nq, H, D), k and v are (B, Nk, H, D), all of one dtype; they may be strided views of larger
    tensors (the last dimension is dense). Returns (B, Nq, H, D) in q's dtype, in memory that is not q's.
    """

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


def _run(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)


@functools.lru_cache(maxsize=8)
def _settle_priority(device: torch.device) -> None:
    """Let PyTorch find its own order of kernels, which it does in its first call on a card.

    Were that call one with `set_priority`, the order would be lost with its end, for everyone in this process: on
    Hopper flash would come before cuDNN from then on.
    """
    x = torch.zeros(1, 1, 16, 64, dtype=torch.float16, device=device)
    F.scaled_dot_product_attention(x, x, x)


def only(name: str) -> AttentionBackend:
    """One kernel of `FUSED`; RuntimeError where it does not take the tensors."""

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(FUSED[name]):
            return _run(q, k, v)

    return attention


def sdpa_first(name: str | None = None) -> AttentionBackend:
    """PyTorch's attention. On CUDA one kernel of `FUSED` first, then the others, as the build and card allow.

    Raises, when called:
        InputError: attention_unavailable: no fused kernel takes these tensors on this card. The unfused one
            would work, and allocate Nq x Nk scores for every head; it is never used on CUDA.
    """
    kernels = sorted(FUSED, key=lambda other: other != name)
    chosen = [FUSED[kernel] for kernel in kernels]

    def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if q.device.type != "cuda":
            return _run(q, k, v)
        if _HAS_PRIORITY:
            _settle_priority(q.device)
        try:
            with sdpa_kernel(chosen, set_priority=True) if _HAS_PRIORITY else sdpa_kernel(chosen):
                return _run(q, k, v)
        except RuntimeError as error:
            if "No available kernel" not in str(error):
                raise
            raise InputError(
                "attention_unavailable",
                "denoise",
                f"no fused attention kernel on {torch.cuda.get_device_name(q.device)} takes {q.dtype}, "
                f"{q.shape[2]} heads of {q.shape[3]}, {q.shape[1]} x {k.shape[1]} tokens",
                "Compute in float16 (cards before Ampere have no bfloat16 kernel)",
            ) from error

    return attention


sdpa: AttentionBackend = sdpa_first()
"""PyTorch's attention, cuDNN before flash before memory-efficient; on the CPU PyTorch's own."""
