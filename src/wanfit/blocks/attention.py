"""Attention back ends: one protocol, one registry."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..errors import InputError

_PREFERRED = tuple(
    getattr(SDPBackend, name)
    for name in ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION")
    if hasattr(SDPBackend, name)
)
_HAS_PRIORITY = "set_priority" in inspect.signature(sdpa_kernel).parameters


class AttentionBackend(Protocol):
    """Full (unmasked) attention.

    q is (B, Nq, H, D), k and v are (B, Nk, H, D), all of one dtype; they may be strided views of larger
    tensors (the last dimension is dense). Returns (B, Nq, H, D) in q's dtype, in memory that is not q's.
    """

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor: ...


def _fused_kernels() -> AbstractContextManager[object]:
    if _HAS_PRIORITY:
        return sdpa_kernel(list(_PREFERRED), set_priority=True)
    return sdpa_kernel(list(_PREFERRED))


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """PyTorch's attention. On CUDA cuDNN, flash, memory-efficient in this order, as the build and card allow.

    Raises:
        InputError: attention_unavailable: no fused kernel takes these tensors on this card. The unfused one
            would work, and allocate Nq x Nk scores for every head; it is never used on CUDA.
    """
    query, key, value = (x.transpose(1, 2) for x in (q, k, v))
    if q.device.type != "cuda":
        return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
    try:
        with _fused_kernels():
            return F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
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


ATTENTION_BACKENDS: Mapping[str, AttentionBackend] = {"sdpa": sdpa}
