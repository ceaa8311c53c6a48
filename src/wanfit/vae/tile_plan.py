"""The plan of one decode or encode: how it is cut, and what it will take."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .windows import AxisTile


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on the compute device at the worst moment, by cause.

    Args:
        weights: of the half of the VAE that runs, in the plan's dtype.
        histories: frames that causal convolutions keep.
        prepared: the buffer for the input of the running convolution.
        activations: everything else that layers allocate; features and pixels on their way included.
        workspace: estimate of what the convolution library asks for, at most; 0 on CPU.
        features: what waits between whole-frame part and tiles; 0 on CUDA, where it waits in the host's memory.
    """

    weights: int
    histories: int
    prepared: int
    activations: int
    workspace: int
    features: int

    @property
    def total(self) -> int:
        return self.weights + self.histories + self.prepared + self.activations + self.workspace + self.features


@dataclass(frozen=True)
class TilePlan:
    """How one decode or encode is cut. Build with `plan_decode` or `plan_encode`.

    Args:
        direction: `decode` or `encode`.
        shape: of the latents (decode) or of the video (encode): (B, C, T, H, W).
        dtype: that the VAE computes in.
        device: kind of device: `cpu`, `cuda`.
        rows, columns: tiles along each axis; cores in positions of the outermost stage's output (decode) or of
            the whole-frame part's input (encode).
        split: index of the first tiled stage (decode) or of the first stage on the whole frame (encode).
        chunk: frames at a time at every resolution.
        channels_last: activations channels last.
        fold_time: 3D convolutions of one new frame run as 2D ones.
        overhead: multiply-adds against the untiled run: 1.08 is 8 % more.
        memory: at the worst moment, weights included.
        feature_bytes: host memory (or file) for the features between whole-frame part and tiles.
    """

    direction: str
    shape: tuple[int, int, int, int, int]
    dtype: torch.dtype
    device: str
    rows: tuple[AxisTile, ...]
    columns: tuple[AxisTile, ...]
    split: int
    chunk: int
    channels_last: bool
    fold_time: bool
    overhead: float
    memory: Memory
    feature_bytes: int

    @property
    def grid(self) -> tuple[int, int]:
        return len(self.rows), len(self.columns)

    @property
    def tiles(self) -> int:
        return len(self.rows) * len(self.columns)

    @property
    def predicted_bytes(self) -> int:
        return self.memory.total
