"""diffusers' own transformer with the same random weights: resident, group offload, layerwise fp8."""

from __future__ import annotations

from collections.abc import Callable

import torch
from accelerate import init_empty_weights
from diffusers import WanTransformer3DModel
from diffusers.hooks import apply_group_offloading
from dit_weights import CONFIG, base_block, fill_rest

from wanfit.checkpoint import to_diffusers_transformer


def _model(layers: int, device: torch.device, where: torch.device) -> WanTransformer3DModel:
    with init_empty_weights():
        model = WanTransformer3DModel(**CONFIG, num_layers=layers)
    fill_rest(model, device)
    state: dict[str, torch.Tensor] = {}
    for name, value in base_block(device).items():
        target = to_diffusers_transformer(f"blocks.0.{name}").removeprefix("blocks.0.")
        wide = target.startswith("scale_shift_table") or target.startswith("norm2")
        stored = value.to(where, torch.float32 if wide else torch.bfloat16)
        for index in range(layers):
            # On the host all blocks can share one copy: the offload hooks pin, or cast, each block on its own.
            state[f"blocks.{index}.{target}"] = stored.clone() if where.type == "cuda" else stored
    model.load_state_dict(state, strict=False, assign=True)
    return model.eval().requires_grad_(False)


def resident(layers: int, device: torch.device) -> WanTransformer3DModel:
    return _model(layers, device, device)


def group(layers: int, device: torch.device) -> WanTransformer3DModel:
    return _offloaded(_model(layers, device, torch.device("cpu")), device)


def fp8_group(layers: int, device: torch.device) -> WanTransformer3DModel:
    model = _model(layers, device, torch.device("cpu"))
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
    return _offloaded(model, device)


def _offloaded(model: WanTransformer3DModel, device: torch.device) -> WanTransformer3DModel:
    apply_group_offloading(
        model,
        onload_device=device,
        offload_device=torch.device("cpu"),
        offload_type="block_level",
        num_blocks_per_group=1,
        use_stream=True,
    )
    return model


PEERS: dict[str, Callable[[int, torch.device], WanTransformer3DModel]] = {
    "resident": resident,
    "group": group,
    "fp8_group": fp8_group,
}
