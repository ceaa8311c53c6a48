"""diffusers' own transformer with the same random weights: resident, group offload, layerwise fp8."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel as Wan
from diffusers.hooks import apply_group_offloading
from dit_weights import CONFIG, base_block, fill_rest

from wanfit.checkpoint import to_diffusers_transformer


def _model(layers: int, device: torch.device, where: torch.device, *, distinct: bool, fp8: bool = False) -> Wan:
    """On the host equal blocks share one pinned copy, in the bytes that the hooks would make of each.

    So a start takes seconds, not the minutes that casting and pinning 14 B parameters take. A forward copies the same
    bytes over the bus.
    """
    with init_empty_weights():
        model = Wan(**CONFIG, num_layers=layers)
    fill_rest(model, device)
    state: dict[str, torch.Tensor] = {}
    for index in range(layers):
        if distinct or index == 0:
            block = dict(_block(model, device, index, fp8=fp8))
            if where.type == "cpu":
                block = {name: value.cpu().pin_memory() for name, value in block.items()}
        shared = where.type == "cpu" or distinct
        state |= {f"blocks.{index}.{name}": value if shared else value.clone() for name, value in block.items()}
    model.load_state_dict(state, strict=False, assign=True)
    return model.eval().requires_grad_(False)


def _block(model: Wan, device: torch.device, seed: int, *, fp8: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """By diffusers' names: norms and modulation in float32; linears in what layerwise casting stores, or bf16."""
    for name, value in base_block(device, seed).items():
        target = to_diffusers_transformer(f"blocks.0.{name}").removeprefix("blocks.0.")
        wide = target.startswith(("scale_shift_table", "norm2"))
        linear = isinstance(model.blocks[0].get_submodule(target.rpartition(".")[0]), torch.nn.Linear)
        stored = value.to(torch.float32 if wide else torch.bfloat16)
        yield target, stored.to(torch.float8_e4m3fn) if fp8 and linear else stored


def resident(layers: int, device: torch.device, *, distinct: bool = False) -> Wan:
    return _model(layers, device, device, distinct=distinct)


def group(layers: int, device: torch.device, *, distinct: bool = False) -> Wan:
    return _offloaded(_model(layers, device, torch.device("cpu"), distinct=distinct), device)


def fp8_group(layers: int, device: torch.device, *, distinct: bool = False) -> Wan:
    model = _model(layers, device, torch.device("cpu"), distinct=distinct, fp8=True)
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    return _offloaded(model, device)


def _offloaded(model: Wan, device: torch.device) -> Wan:
    apply_group_offloading(
        model,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
    )
    return model


PEERS: dict[str, Callable[..., Wan]] = {
    "resident": resident,
    "group": group,
    "fp8_group": fp8_group,
}
