"""Matrix products in float8: weights as the file stores them, activations with one scale a row.

The scale of a row is its largest magnitude, which no fixed scale from a file can better, so `input_scale` is not
needed. It is applied after the product, together with the bias, by whatever reads the product next: the kernel is
the one with one scale for each operand, which every card with float8 units and every build of PyTorch has.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

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
    _products: dict[int, torch.Tensor] = field(default_factory=dict[int, torch.Tensor], repr=False, compare=False)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The values."""
        return self.data.to(dtype).mul_((self.scale / LARGEST).to(dtype).unsqueeze(-1))

    def times(self, matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """data @ matrix.T / 448, flat: (rows, len(matrix)). Computed once, and kept as long as these rows.

        Args:
            matrix: (N, K) float8_e4m3fn that lives as long as these rows; K and N are multiples of 16.
            dtype: 16 bit.
        """
        known = self._products.get(id(matrix))
        if known is None:
            one, unit = (_constant(value, self.data.device) for value in (1.0, 1.0 / LARGEST))
            known = _scaled_mm(self.data, matrix, unit, one, dtype)
            self._products[id(matrix)] = known
        return known


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
    return _scaled_mm(x.data, weight.data, unit, factor, dtype, fast=True).view(*x.data.shape[:-1], weight.shape[0])


def _scaled_mm(
    x: torch.Tensor,
    matrix: torch.Tensor,
    scale_x: torch.Tensor,
    scale_matrix: torch.Tensor,
    dtype: torch.dtype,
    *,
    fast: bool = False,
) -> torch.Tensor:
    """(rows, len(matrix)); fast: sums are not widened on the way, on cards that do that (Hopper)."""
    return torch._scaled_mm(  # pyright: ignore[reportPrivateUsage, reportPrivateImportUsage]
        x.reshape(-1, x.shape[-1]), matrix.t(), scale_a=scale_x, scale_b=scale_matrix, out_dtype=dtype,
        use_fast_accum=fast,
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _constant(value: float, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=torch.float32, device=device)
