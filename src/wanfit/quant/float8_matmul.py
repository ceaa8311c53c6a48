"""Matrix products in float8: weights as the file stores them, activations with one scale a row.

The scale of a row is its largest magnitude, which no fixed scale from a file can better, so `input_scale` is not
needed. It is applied after the product, together with the bias, by whatever reads the product next: the kernel is
the one with one scale for each operand, which every card with float8 units and every build of PyTorch has.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .weight import StoredWeight

LARGEST = 448.0
"""The largest float8_e4m3fn."""

_SMALLEST_SCALE = 1e-12


@dataclass(frozen=True)
class Float8Rows:
    """An activation: value = data * scale / 448.

    Args:
        data: (..., K) float8_e4m3fn, dense.
        scale: (...,) float32, the largest magnitude of each row.
    """

    data: torch.Tensor
    scale: torch.Tensor

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The values."""
        return self.data.to(dtype).mul_((self.scale / LARGEST).to(dtype).unsqueeze(-1))


def quantize_rows(x: torch.Tensor) -> Float8Rows:
    """Memory: one float32 copy of x."""
    scale = torch.linalg.vector_norm(x, float("inf"), dim=-1, dtype=torch.float32).clamp_(min=_SMALLEST_SCALE)
    data = x.to(torch.float32, copy=True).mul_((LARGEST / scale).unsqueeze(-1)).clamp_(-LARGEST, LARGEST)
    return Float8Rows(data.to(torch.float8_e4m3fn), scale)


@functools.lru_cache(maxsize=8)
def float8_units(device: torch.device) -> bool:
    """Whether the device multiplies float8 itself: NVIDIA Ada, Hopper and later."""
    return (
        device.type == "cuda" and torch.version.cuda is not None and torch.cuda.get_device_capability(device) >= (8, 9)
    )


def takes_float8(weight: StoredWeight) -> bool:
    """Whether `matmul` takes this weight: float8, one scale or none, and nothing against it in the file."""
    scale = weight.params.get("scale")
    return (
        weight.format in ("f8_e4m3", "f8_e5m2")
        and len(weight.shape) == 2
        and not any(size % 16 for size in weight.shape)
        and (scale is None or scale.numel() == 1)
        and not weight.options.get("full_precision_matmul", False)
    )


def matmul(x: Float8Rows, weight: StoredWeight, dtype: torch.dtype) -> torch.Tensor:
    """x @ weight.T without the scales of x's rows: multiply row i of the result by `x.scale[i]`.

    Args:
        weight: one that `takes_float8`, on x's device.
        dtype: of the result, 16 bit.
    Returns: (..., out).
    """
    unit = _constant(1.0 / LARGEST, x.data.device)
    scale = weight.params.get("scale")
    factor = _constant(1.0, x.data.device) if scale is None else scale.to(torch.float32).reshape(())
    flat = x.data.reshape(-1, x.data.shape[-1])
    product = torch._scaled_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        flat, weight.data.t(), scale_a=unit, scale_b=factor, out_dtype=dtype, use_fast_accum=True
    )
    return product.view(*x.data.shape[:-1], weight.shape[0])


@dataclass(frozen=True)
class Float8LowRank:
    """LoRAs of one linear, all in one: their `down` in float8, with the scales of its rows moved into `up`.

    Args:
        down: (rank, in) float8_e4m3fn. up: (out, rank), 16 bit; rank is a multiple of 16.
    """

    down: torch.Tensor
    up: torch.Tensor

    def add_to(self, output: torch.Tensor, x: Float8Rows) -> None:
        """Add to `output` (..., out), which is without the scales of x's rows, as `matmul` gives it."""
        unit = _constant(1.0 / LARGEST, x.data.device)
        inner = torch._scaled_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
            x.data.reshape(-1, x.data.shape[-1]), self.down.t(), scale_a=unit, scale_b=unit, out_dtype=self.up.dtype
        )
        output.view(-1, output.shape[-1]).addmm_(inner, self.up.t())


def quantize_low_rank(
    downs: Sequence[torch.Tensor], ups: Sequence[torch.Tensor], scales: Sequence[float], dtype: torch.dtype
) -> Float8LowRank:
    """sum of scale * up @ down, for `Float8Rows`. Relative error 3e-2 of what the LoRAs add, as the product itself.

    Args:
        downs: (rank, in) each. ups: (out, rank) each.
    """
    rank = sum(len(down) for down in downs)
    missing = -rank % 16
    rows = quantize_rows(torch.nn.functional.pad(torch.cat([down.to(dtype) for down in downs]), (0, 0, 0, missing)))
    up = torch.cat([up.float() * scale for up, scale in zip(ups, scales, strict=True)], dim=1)
    return Float8LowRank(rows.data, (torch.nn.functional.pad(up, (0, missing)) * rows.scale).to(dtype))


@functools.lru_cache(maxsize=16)
def _constant(value: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)
