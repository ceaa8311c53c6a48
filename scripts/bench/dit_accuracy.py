"""Relative error of one forward at few tokens, against float32 on the same weights. Every block is another one."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from dit_peers import PEERS
from dit_weights import DrawnBlocks, build, inputs

from wanfit.blocks import ForwardSettings
from wanfit.blocks.elementwise import PLAIN
from wanfit.offload import Ladder

FRAMES = 5
EXACT = ForwardSettings(chunk_tokens=4096, float8_matmul=False, elementwise=PLAIN)
VARIANTS = {
    "plain": EXACT,
    "fused": ForwardSettings(chunk_tokens=4096, float8_matmul=False),
    "fused, packed": ForwardSettings(chunk_tokens=4096, float8_matmul=False, packed_attention=True),
    "fused, float8": ForwardSettings(chunk_tokens=4096),
    "fused, float8, packed": ForwardSettings(chunk_tokens=4096, packed_attention=True),
}


def accuracy(options: argparse.Namespace, device: torch.device) -> Iterator[dict]:
    """A row for each variant of ours, for float32 that is rounded between blocks, and for the peers."""
    torch.backends.cuda.matmul.allow_tf32 = False

    def given(dtype: torch.dtype) -> dict[str, torch.Tensor]:
        values = inputs("480p", FRAMES, device, torch.bfloat16)
        return {k: v if k == "timestep" else v.to(dtype) for k, v in values.items()}

    def run(source: DrawnBlocks, settings: ForwardSettings, dtype: torch.dtype, *, rounded: bool = False):  # noqa: ANN202
        model = build(source, Ladder(settings), options.blocks, device)
        if dtype == torch.float32:
            model.float()
        if rounded:
            for block in model.blocks:
                block.register_forward_hook(lambda _, __, hidden: hidden.copy_(hidden.bfloat16()))
        return model(**given(dtype), return_dict=False)[0].double()

    def row(engine: str, layout: str, value: torch.Tensor, reference: torch.Tensor) -> dict:
        error = float((value - reference).norm() / reference.norm())
        size = f"480p x {FRAMES}, {options.blocks} blocks"
        return {"engine": engine, "layout": layout, "size": size, "error": error}

    for layout in options.layouts:
        exact = DrawnBlocks(layout, device, exact=True)
        reference = run(exact, EXACT, torch.float32)
        value = run(exact, EXACT, torch.float32, rounded=True)
        yield row("float32, rounded to bf16 between blocks", layout, value, reference)
        for name, settings in VARIANTS.items():
            if "float8" not in name or layout == "fp8_scaled":
                value = run(DrawnBlocks(layout, device), settings, torch.bfloat16)
                yield row(f"wanfit {name}", layout, value, reference)
    if options.peers:
        reference = run(DrawnBlocks("bf16", device, exact=True), EXACT, torch.float32)
        for name in options.peers:
            peer = PEERS[name](options.blocks, device, distinct=True)
            yield row(
                f"diffusers {name}", "bf16", peer(**given(torch.bfloat16), return_dict=False)[0].double(), reference
            )
            del peer
        value = run(DrawnBlocks("fp8_scaled", device), VARIANTS["fused, float8"], torch.bfloat16)
        yield row("wanfit fused, float8", "fp8_scaled, against the bf16 weights", value, reference)
