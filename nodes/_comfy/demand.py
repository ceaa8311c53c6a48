"""Device memory of sampling: what the engine's plan says, in the terms that ComfyUI asks in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import comfy.model_management
import torch

from ...src.wanfit.blocks import ForwardSettings
from ...src.wanfit.checkpoint import VARIANTS
from ...src.wanfit.memory.demand import RING, Video, forward_causes
from ...src.wanfit.memory.machine import Machine
from ...src.wanfit.memory.parts import TransformerPart
from ...src.wanfit.memory.plan import CHUNK_TOKENS
from ...src.wanfit.memory.record import PlannedPeak
from ...src.wanfit.offload.policy import beyond_ring, resident_within
from .placement import Placement
from .policy import Policy

_HEADROOM = 2**29
"""Device bytes left free beside weights and activations: allocator rounding, other small tensors."""

_BATCHING = 1.5
"""ComfyUI puts conditionals into one batch when 1.5 times `memory_required` is free."""


@dataclass(frozen=True)
class Demand:
    """Of one model. `activations` below: bytes of one forward, LoRAs included, weights as stored not."""

    part: TransformerPart
    placement: Placement

    @property
    def smallest(self) -> tuple[int, ...]:
        """Latent shape (B, C, T, H, W) of the smallest video."""
        return (1, self.part.in_channels, 1, 2, 2)

    def forward(self, input_shape: Sequence[int], machine: Machine, *, loras: bool = False) -> int:
        """One forward of a latent of that shape, with or without LoRAs; their own bytes and weights as stored not."""
        batch, _, frames, height, width = input_shape
        multiple = VARIANTS[self.part.variant].size_multiple
        size = (-(-side // 2) * multiple for side in (width, height))
        video = Video(*size, 4 * frames - 3, image=False, size_multiple=multiple, batch=batch)
        settings = ForwardSettings(CHUNK_TOKENS)
        return sum(forward_causes(self.part, video, machine, settings, loras=loras).values())

    def with_slots(self, activations: int) -> int:
        """Together with the slots that blocks pass through."""
        return activations + RING * self.placement.slot_bytes

    def required(self, activations: int, policy: Policy, device: torch.device, dtype: torch.dtype) -> int:
        """What ComfyUI is asked to free: room for all blocks unless they stream, within the budget and the card."""
        floor = self.with_slots(activations)
        wanted = floor if policy.mode == "stream" else activations + self.part.num_layers * self.placement.slot_bytes
        management = comfy.model_management
        reserve = self.part.rest_bytes(dtype) + 2 * _HEADROOM + int(management.extra_reserved_memory())
        limit = policy.vram_bytes or int(management.get_total_memory(device)) - reserve
        return max(floor, min(wanted, limit))

    def weight_budget(self, activations: int, policy: Policy, device: torch.device) -> int:
        """Bytes for blocks on `device` now."""
        if device.type == "cpu":
            return 0
        store = self.placement.store
        held = store.report.device_bytes if store is not None else 0
        budget = int(comfy.model_management.get_free_memory(device)) + held - int(activations * _BATCHING) - _HEADROOM
        if policy.vram_bytes:
            budget = min(budget, policy.vram_bytes - activations)
        return budget

    def peak(
        self, activations: int, policy: Policy, device: torch.device, dtype: torch.dtype, budget: int
    ) -> PlannedPeak:
        """What sampling will take, for the memory probe."""
        if device.type == "cpu":
            return PlannedPeak(0, 0, activations)
        slot, count = self.placement.slot_bytes, self.part.num_layers
        least = self.with_slots(activations) + self.part.rest_bytes(dtype)
        stay = {"stream": 0, "resident": count}.get(policy.mode, resident_within(budget, slot, RING, count))
        kept = min(self.placement.ram_budget(policy), slot * sum(part.num_layers for part in self.placement.parts))
        return PlannedPeak(least, least + beyond_ring(stay, RING, count) * slot, kept)
