"""Tiny Wan transformers of diffusers as the reference, and their blocks' weights under the original names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from diffusers import WanTransformer3DModel
from torch import nn

from wanfit.blocks import BlockShape, ForwardSettings, LeanBlock
from wanfit.quant.weight import StoredWeight

TEXT_TOKENS = 512
FORMAT_OF = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}
LEAF_NAMES = {
    "scale_shift_table": "modulation",
    "norm2.weight": "norm3.weight",
    "norm2.bias": "norm3.bias",
    "ffn.net.0.proj.weight": "ffn.0.weight",
    "ffn.net.0.proj.bias": "ffn.0.bias",
    "ffn.net.2.weight": "ffn.2.weight",
    "ffn.net.2.bias": "ffn.2.bias",
}
ATTENTION_NAMES = {
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "o",
    "add_k_proj": "k_img",
    "add_v_proj": "v_img",
    "norm_q": "norm_q",
    "norm_k": "norm_k",
    "norm_added_k": "norm_k_img",
}


def original_name(name: str) -> str:
    """diffusers' name of a block's parameter -> Wan's."""
    if name in LEAF_NAMES:
        return LEAF_NAMES[name]
    attention, _, rest = name.partition(".")
    module, _, leaf = rest.rpartition(".")
    return f"{'self_attn' if attention == 'attn1' else 'cross_attn'}.{ATTENTION_NAMES[module]}.{leaf}"


def block_weights(block: nn.Module) -> dict[str, StoredWeight]:
    state = block.state_dict()
    return {original_name(k): StoredWeight(FORMAT_OF[v.dtype], tuple(v.shape), v) for k, v in state.items()}


def tiny_transformer(dtype: torch.dtype = torch.float32, **changes: object) -> WanTransformer3DModel:
    """Two layers of two heads of 128, with weights of a size that lets every part of a block count."""
    torch.manual_seed(0)
    config = {"num_attention_heads": 2, "num_layers": 2, "ffn_dim": 704, "text_dim": 32, "freq_dim": 32}
    model = WanTransformer3DModel(**(config | changes)).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            nn.init.uniform_(parameter, 0.5, 1.5)
        elif parameter.ndim == 1:
            nn.init.normal_(parameter, std=0.1)
    # as from_pretrained(torch_dtype=...) does it
    for name, parameter in model.named_parameters():
        if not any(part in name.split(".") for part in model._keep_in_fp32_modules):
            parameter.data = parameter.data.to(dtype)
    return model


class ResidentSource:
    """All blocks in memory; keeps a log of what is asked for."""

    def __init__(self, blocks: list[Mapping[str, StoredWeight]]) -> None:
        self.blocks = blocks
        self.log: list[tuple[str, int]] = []

    @contextmanager
    def onload(self, index: int) -> Iterator[Mapping[str, StoredWeight]]:
        self.log.append(("onload", index))
        try:
            yield self.blocks[index]
        finally:
            self.log.append(("release", index))


def shape_of(model: WanTransformer3DModel, image_tokens: int | None = 0) -> BlockShape:
    config = model.config
    dim = config.num_attention_heads * config.attention_head_dim
    return BlockShape(dim, config.num_attention_heads, config.ffn_dim, config.eps, image_tokens)


def make_lean(model: WanTransformer3DModel, settings: ForwardSettings, image_tokens: int | None = 0) -> ResidentSource:
    """Replace the model's blocks by LeanBlocks over the same weights; returns their source."""
    source = ResidentSource([block_weights(block) for block in model.blocks])
    shape = shape_of(model, image_tokens)
    model.blocks = nn.ModuleList(LeanBlock(i, source, shape, settings) for i in range(len(source.blocks)))
    return source


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected|, both as vectors, in float64."""
    return float((actual.double() - expected.double()).norm() / expected.double().norm())
