"""What a WanFit MODEL tells ComfyUI that it needs, against the engine's plan of the same file and size."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
from comfy_graphs import Graph, wanfit_model

from wanfit.blocks import ForwardSettings
from wanfit.checkpoint import open_checkpoint
from wanfit.memory.demand import RING, Video, denoise_demand
from wanfit.memory.machine import Machine
from wanfit.memory.parts import transformer_part

if TYPE_CHECKING:
    from comfyui_server import Server


def told_and_planned(server: Server, file: str, policy: str, *, card: bool, video: Video) -> tuple[int, int]:
    """Bytes from the MODEL, and from the plan for the machine that the MODEL says it is on.

    Args:
        card: state an Ada card instead of the server's own device.
    """
    with open_checkpoint(server.base / "models" / "diffusion_models" / file) as checkpoint:
        part = transformer_part(checkpoint)
    step = video.size_multiple // 2
    graph = Graph()
    placed = graph.add(
        "WanFitOffloadPolicy", model=wanfit_model(graph, file), policy=policy, vram_budget=0.0, ram_budget=0.0,
        attention="comfyui",
    )  # fmt: skip
    node = graph.add(
        "TestMemoryRequired", model=placed, card=card, batch=video.batch, channels=part.in_channels,
        frames=video.latent_frames, height=video.height // step, width=video.width // step,
    )  # fmt: skip
    told = json.loads(server.run(graph.prompt)["outputs"][node[0]]["text"][0])
    machine = Machine(
        device=told["device"], vram=0, ram=0, dtype=getattr(torch, told["dtype"]), float8=told["float8"],
        fused=told["fused"],
    )  # fmt: skip
    assert (machine.device == "cuda") >= card
    demand = denoise_demand("denoise", part, part.block_bytes, video, machine, ForwardSettings(4096))
    planned = demand.vram_needed if machine.device == "cuda" else demand.ram_needed
    planned -= part.rest_bytes(machine.dtype)  # ComfyUI counts the model's rest itself
    if machine.device == "cuda" and policy != "stream":
        planned += (part.num_layers - RING) * part.block_bytes
    return told["required"], planned
