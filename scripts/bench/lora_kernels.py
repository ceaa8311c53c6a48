"""Microseconds of the kernels that a LoRA adds beside float8 products, for one chunk of rows of the 14B transformer.

    python scripts/dev.py bench lora_kernels [--rows 4096] [--rank 64]

Medians of `triton.testing.do_bench`, which empties the caches between runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from wanfit.blocks.elementwise import elementwise_for
from wanfit.blocks.product import LowRankTerm, Product
from wanfit.quant.float8_matmul import Float8Rows, float8_units, quantize_rows

DIM, FFN = 5120, 13824
DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16


def draw(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def show(what: str, call: Callable[[], object]) -> None:
    from triton.testing import do_bench  # not where PyTorch is built for the CPU

    print(f"{what:48} {do_bench(call, return_mode='median') * 1e3:6.1f} us", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rank", type=int, default=64)
    options = parser.parse_args()
    if not torch.cuda.is_available() or not float8_units(DEVICE):
        raise SystemExit("this benchmark needs a CUDA device that multiplies float8")
    rows, rank = options.rows, options.rank
    parts = elementwise_for(DEVICE, DTYPE)
    for columns, width in ((DIM, rank), (DIM, 3 * rank), (FFN, rank)):
        data, scale = (x := quantize_rows(draw(1, rows, columns))).data, x.scale
        down = quantize_rows(draw(width, columns)).data
        show(f"down, {columns} x {width}", lambda d=data, s=scale, w=down: Float8Rows(d, s).times(w, DTYPE))
    for columns in (DIM, FFN):
        product, term = draw(1, rows, columns), LowRankTerm(draw(rows, rank), draw(columns, rank))
        show(f"up in place (addmm_), {columns}", lambda p=product, t=term: Product(p, low_rank=t).value())
        show(f"up by itself, {columns}", lambda p=product, t=term: Product(p, low_rank=t).low_rank_value())
    row_scale = torch.rand(1, rows, device=DEVICE)
    for name, given in (("without", None), ("with", term)):
        wide = Product(product, row_scale, draw(FFN), given)
        show(f"GELU into float8, {FFN}, {name} a LoRA", lambda w=wide: parts.gelu(w, quantize=True))
    product, term = draw(1, rows, DIM), LowRankTerm(draw(rows, rank), draw(DIM, rank))
    bias, out = draw(DIM), draw(1, rows, DIM)
    for name, given in (("without", None), ("with", term)):
        norm = Product(product, row_scale, bias, given)
        show(f"norm, {DIM}, {name} a LoRA", lambda n=norm: parts.rms_norm_rotate(n, bias, 1e-6, None, 40, out))
    gate, residual = draw(1, 1, DIM, dtype=torch.float32), draw(1, rows, DIM, dtype=torch.float16)
    for name, low_rank in (("without", None), ("with", term)):
        given = Product(product, row_scale, bias, low_rank)
        show(f"gated add, {DIM}, {name} a LoRA", lambda g=given: parts.add_gated(g, gate, residual))


if __name__ == "__main__":
    main()
