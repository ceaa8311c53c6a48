"""The element-wise parts of a block: what they compute, in plain PyTorch; fused kernels where there are any."""

from __future__ import annotations

import functools
from typing import Protocol

import torch
import torch.nn.functional as F

from ..quant.float8_matmul import Float8Rows, quantize_rows
from ..quant.triton_support import triton_refusal
from .product import Product
from .rope import rotate_into


class Elementwise(Protocol):
    """All results are computed in float32 and rounded once or twice to the dtype of the data."""

    name: str

    def norm(
        self,
        x: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
        *,
        dtype: torch.dtype,
        quantize: bool,
    ) -> torch.Tensor | Float8Rows:
        """layer_norm(x) * scale + shift in `dtype`; shift and scale are float32 (B or 1, C or 1, dim)."""
        ...

    def rms_norm_rotate(
        self,
        product: Product,
        weight: torch.Tensor,
        eps: float,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        num_heads: int,
        out: torch.Tensor,
    ) -> None:
        """rms_norm(product) * weight, rotated, into `out` (B, C, dim), which may be the product's own data."""
        ...

    def gelu(self, product: Product, *, quantize: bool) -> torch.Tensor | Float8Rows:
        """GELU by tanh; may overwrite the product."""
        ...

    def store(self, product: Product, out: torch.Tensor) -> None:
        """The product's values into `out` (B, C, dim)."""
        ...

    def add_gated(self, product: Product, gate: torch.Tensor | None, residual: torch.Tensor) -> None:
        """residual += product * gate, in place; gate is float32 (B or 1, C or 1, dim). The residual may have another
        dtype."""
        ...

    def quantize(self, x: torch.Tensor) -> Float8Rows: ...

    def pack(self, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
        """x (B, C, H, D) into int8 `data` of that shape and float32 `scale` (B, C, H): x = data * scale."""
        ...

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor: ...


class PlainElementwise:
    """The reference, and what runs where there is no Triton."""

    name = "plain"

    def norm(
        self,
        x: torch.Tensor,
        shift: torch.Tensor,
        scale: torch.Tensor,
        eps: float,
        *,
        dtype: torch.dtype,
        quantize: bool,
    ) -> torch.Tensor | Float8Rows:
        normed = F.layer_norm(x.float(), (x.shape[-1],), eps=eps)
        out = normed if dtype == torch.float32 else normed.new_empty(normed.shape, dtype=dtype)
        torch.addcmul(shift, normed, scale, out=out)
        return quantize_rows(out) if quantize else out

    def rms_norm_rotate(
        self,
        product: Product,
        weight: torch.Tensor,
        eps: float,
        rotary: tuple[torch.Tensor, torch.Tensor] | None,
        num_heads: int,
        out: torch.Tensor,
    ) -> None:
        normed = F.rms_norm(product.value(), (out.shape[-1],), weight, eps)
        if rotary is None:
            out.copy_(normed)
        else:
            rotate_into(out, normed, *rotary, num_heads)

    def gelu(self, product: Product, *, quantize: bool) -> torch.Tensor | Float8Rows:
        value = torch.ops.aten.gelu_(product.value(), approximate="tanh")
        return quantize_rows(value) if quantize else value

    def store(self, product: Product, out: torch.Tensor) -> None:
        out.copy_(product.value())

    def add_gated(self, product: Product, gate: torch.Tensor | None, residual: torch.Tensor) -> None:
        if gate is None:
            residual += product.value()
        else:
            torch.addcmul(residual, product.value(), gate, out=residual)

    def quantize(self, x: torch.Tensor) -> Float8Rows:
        return quantize_rows(x)

    def pack(self, x: torch.Tensor, data: torch.Tensor, scale: torch.Tensor) -> None:
        torch.linalg.vector_norm(x, float("inf"), dim=-1, dtype=torch.float32, out=scale)
        scale.clamp_(min=1e-12).div_(127)
        data.copy_(torch.div(x, scale.unsqueeze(-1)).round_())

    def unpack(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return torch.mul(data, scale.unsqueeze(-1)).to(dtype)


PLAIN: Elementwise = PlainElementwise()


@functools.lru_cache(maxsize=16)
def elementwise_for(device: torch.device, dtype: torch.dtype) -> Elementwise:
    """The fused kernels where Triton works, for 16 bit; else the plain ones."""
    if dtype == torch.float32 or triton_refusal(device) is not None:
        return PLAIN
    from .elementwise_triton import TritonElementwise

    return TritonElementwise()
