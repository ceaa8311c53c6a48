"""The versions of PyTorch and cuDNN whose 16-bit 3D convolution must not be used, and the way round it."""

from __future__ import annotations

import re

import torch


def conv3d_trap(torch_version: str, cudnn_version: int | None) -> str:
    """Why 16-bit `conv3d` on CUDA takes about three times the memory (or is wrong) here; empty when it does not.

    PyTorch 2.9.0 passes cuDNN by for every 3D convolution when cuDNN is 9.8 or newer; 2.9.1 and later do so for
    cuDNN 9.8 to 9.14, whose results were found wrong on some cards.
    The way round it: with one new frame at a time, a convolution over three frames is a 2D convolution whose
    channels are (channel, frame); no 3D kernel runs. See `StageRunner`.

    Source: pytorch/pytorch issues 166643, 163539 and pull request 166480.
    """
    match = re.match(r"(\d+)\.(\d+)\.?(\d*)", torch_version)
    if match is None or cudnn_version is None:
        return ""
    release = (int(match[1]), int(match[2]), int(match[3] or 0))
    if release < (2, 9, 0) or cudnn_version < 90800:
        return ""
    if release >= (2, 9, 1) and cudnn_version >= 91500:
        return ""
    return f"torch {torch_version} does not use cuDNN {cudnn_version} for 16-bit 3D convolutions"


def trap_here(device: torch.device, dtype: torch.dtype) -> str:
    """`conv3d_trap` of this process for tensors of `dtype` on `device`."""
    if device.type != "cuda" or dtype not in (torch.float16, torch.bfloat16) or torch.version.hip:
        return ""
    return conv3d_trap(torch.__version__, torch.backends.cudnn.version())
