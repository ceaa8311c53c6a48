"""The engine behind one model: its blocks' weights, its settings, what it does with memory."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch

from ...src.wanfit.blocks import (
    AttentionBackend,
    BlockPatches,
    BlockShape,
    ForwardSettings,
    LowRank,
    WeightSource,
    choose_attention,
    require_finite,
)
from ...src.wanfit.checkpoint import VARIANTS, Checkpoint
from ...src.wanfit.memory.alarm import Alarm, Shortage
from ...src.wanfit.memory.demand import RING, Video, forward_causes
from ...src.wanfit.memory.machine import Machine
from ...src.wanfit.memory.record import PlannedPeak
from ...src.wanfit.offload import Ladder, PatchStore
from ...src.wanfit.offload.policy import resident_within
from ...src.wanfit.quant import StoredWeight
from ...src.wanfit.quant.float8_matmul import float8_units
from ...src.wanfit.quant.triton_support import triton_refusal
from . import lora, options
from .placement import Placement
from .policy import Policy
from .prompt_record import RECORDER

CHUNK_TOKENS = 4096
POLICY_KEY = "wanfit_policy"
_HEADROOM = 2**29
"""Device bytes left free beside weights and activations: allocator rounding, other small tensors."""

_BATCHING = 1.5
"""ComfyUI puts conditionals into one batch when 1.5 times `memory_required` is free."""


@dataclass(frozen=True)
class BlockCall:
    """What one block forward needs besides its tensors."""

    weights: Mapping[str, StoredWeight]
    adapters: Mapping[str, Sequence[LowRank]]
    settings: ForwardSettings


class EngineRuntime:
    """Shared by a model and all its clones. Holds no strong reference to the model.

    Args:
        checkpoint: of a transformer.
        placement: of its blocks; `expert` is the checkpoint's number in it.
        dtype: compute dtype.
    """

    def __init__(self, checkpoint: Checkpoint, placement: Placement, expert: int, dtype: torch.dtype) -> None:
        identity = checkpoint.identity
        self.checkpoint, self.placement, self.dtype = checkpoint, placement, dtype
        self.shape = BlockShape(identity.dim, identity.num_heads, identity.ffn_dim)
        self.part = placement.parts[expert]
        self.preparing: Any = None
        """The clone that is about to sample, while ComfyUI asks for `memory_required`."""
        self._expert = expert
        self._settings = ForwardSettings(CHUNK_TOKENS)
        self._ladder: Ladder | None = None
        self.alarm: Alarm | None = None
        """Asked before each block; made for the first forward on a device."""
        self._model: weakref.ref[Any] | None = None
        self._source: tuple[torch.device, WeightSource] | None = None
        self._patches: tuple[Any, dict[int, BlockPatches]] = (None, {})
        self._patch_store: tuple[Any, PatchStore] | None = None
        self._attention: AttentionBackend | None = None
        """The engine's own, unless the policy leaves it to ComfyUI."""
        self._rotary: tuple[weakref.ref[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None
        RUNTIMES.add(self)

    def attach(self, model: Any) -> None:
        """Serve this `comfy.model_base` object: its clone in use decides on patches and policy."""
        self._model = weakref.ref(model)

    def tensor_names(self, index: int) -> list[str]:
        """Names of block `index`'s tensors, without `blocks.N.`."""
        prefix = f"blocks.{index}."
        return [name.removeprefix(prefix) for name in self.checkpoint.tensors if name.startswith(prefix)]

    def block_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every block tensor, by canonical name."""
        return {name: info.shape for name, info in self.checkpoint.tensors.items() if name.startswith("blocks.")}

    def shape_for(self, image_tokens: int) -> BlockShape:
        """The blocks' shape for a context with that many image tokens."""
        return dataclasses.replace(self.shape, image_tokens=image_tokens) if image_tokens else self.shape

    def forward(
        self, executor: Callable[..., torch.Tensor], x: torch.Tensor, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """ComfyUI's DIFFUSION_MODEL wrapper: bring in the weights; on out-of-memory run again in less memory."""

        def run(settings: ForwardSettings) -> torch.Tensor:
            self._settings = settings
            return executor(x, *args, **kwargs)

        if self._source is None or self._source[0] != x.device:
            policy = self._policy()
            self._attention = self._engine_attention(policy, x)
            budget = self._weight_budget(policy, x.device, x.shape)
            self._source = x.device, self.placement.source(self._expert, x.device, policy, budget)
            self._settings = ForwardSettings(CHUNK_TOKENS, float8_matmul=None if policy.fp8_matmul else False)
            RECORDER.expect(self._planned(policy, x, budget))
        if self.alarm is None or self.alarm.device != x.device:
            self.alarm = Alarm(x.device)
        self._ladder = Ladder(self._settings, self.placement.store, _say, self.alarm, self._make_room)
        output = self._ladder.run(run)
        what = "the model's result became NaN or infinite"
        require_finite(output, what, dtype=self.dtype, patched=bool(self._current_patches()), given=x)
        return output

    @contextmanager
    def onload(self, index: int, device: torch.device, transformer_options: dict[str, Any]) -> Iterator[BlockCall]:
        """Everything for block `index`'s forward on `device`, patches of the clone in use applied."""
        if self._source is None or self._ladder is None:
            raise RuntimeError("a block ran outside of its model's forward")
        self._settings = self._ladder.next_block()
        settings = self._call_settings(transformer_options)
        with self._source[1].onload(index) as weights, self._patches_on(device).onload(index) as patches:
            yield BlockCall(patches.over(weights, self.dtype), patches.low_rank, settings)

    def rotary(self, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ComfyUI's rotation matrices (1, N, 1, D/2, 2, 2) as (cos, sin), each (1, N, 1, D); kept for one forward."""
        if self._rotary is None or self._rotary[0]() is not freqs:
            cos, sin = (freqs[..., row, 0].repeat_interleave(2, dim=-1) for row in (0, 1))
            self._rotary = weakref.ref(freqs), (cos, sin)
        return self._rotary[1]

    def memory_required(self, input_shape: Sequence[int], cond_shapes: Mapping[str, Any] | None = None) -> int:
        """Bytes that sampling will allocate on the device besides the model's small rest.

        ComfyUI frees that much before it samples, and decides with it how many conditionals go in one batch;
        while sampling the blocks are on the device already and do not count again.

        Args:
            input_shape: of the latent, (B, C, T, H, W).
        """
        device = comfy.model_management.get_torch_device()
        activations = self._forward_bytes(input_shape, device)
        if self._patcher() is not None or self.machine(device).device == "cpu":
            return activations
        policy = self._policy()
        floor = activations + RING * self.placement.slot_bytes
        wanted = floor if policy.mode == "stream" else activations + self.part.num_layers * self.placement.slot_bytes
        limit = policy.vram_bytes or int(comfy.model_management.get_total_memory(device)) - self._reserve()
        return max(floor, min(wanted, limit))

    def floor_bytes(self) -> int:
        """Device bytes without which no forward is possible, however small the video."""
        smallest = (1, self.part.in_channels, 1, 2, 2)
        return RING * self.placement.slot_bytes + self._forward_bytes(
            smallest, comfy.model_management.get_torch_device()
        )

    def release(self) -> None:
        """Give up all device memory; the next forward takes it again."""
        self._source = self._rotary = self._ladder = None
        if self._patch_store is not None:
            self._patch_store[1].release_device()
        self.placement.release_device()

    def release_host(self) -> int:
        """Give up copies of blocks and LoRAs in RAM too; returns their bytes."""
        self._source = self._rotary = self._ladder = None
        loras = 0
        if self._patch_store is not None:
            loras = self._patch_store[1].host_bytes
            self._patch_store[1].close()
            self._patch_store = None
        return loras + self.placement.release_host()

    def machine(self, device: torch.device) -> Machine:
        """What `device` computes with, for the engine's plan; without its memory."""
        return Machine(
            device="cpu" if device.type == "cpu" else "cuda",
            vram=0,
            ram=0,
            dtype=self.dtype,
            float8=self._policy().fp8_matmul and float8_units(device),
            fused=triton_refusal(device) is None,
        )

    def _forward_bytes(self, input_shape: Sequence[int], device: torch.device) -> int:
        """One forward as the engine plans it, and LoRAs; weights as stored not counted."""
        batch, _, frames, height, width = input_shape
        multiple = VARIANTS[self.part.variant].size_multiple
        size = (-(-side // 2) * multiple for side in (width, height))
        video = Video(*size, 4 * frames - 3, image=False, size_multiple=multiple, batch=batch)
        causes = forward_causes(self.part, video, self.machine(device), ForwardSettings(CHUNK_TOKENS))
        return sum(causes.values()) + self._patch_bytes()

    def _patch_bytes(self) -> int:
        """LoRAs on the device: all of them, or those of two blocks."""
        sizes = sorted((block.nbytes(self.dtype) for block in self._current_patches().values()), reverse=True)
        return sum(sizes if self._policy().mode == "resident" else sizes[:RING])

    def _weight_budget(self, policy: Policy, device: torch.device, input_shape: Sequence[int]) -> int:
        if device.type == "cpu":
            return 0
        activations = self._forward_bytes(input_shape, device)
        store = self.placement.store
        held = store.report.device_bytes if store is not None else 0
        budget = int(comfy.model_management.get_free_memory(device)) + held - int(activations * _BATCHING) - _HEADROOM
        if policy.vram_bytes:
            budget = min(budget, policy.vram_bytes - activations)
        return budget

    def _planned(self, policy: Policy, x: torch.Tensor, budget: int) -> PlannedPeak:
        """What sampling will take, for the memory probe."""
        activations = self._forward_bytes(x.shape, x.device)
        if x.device.type == "cpu":
            return PlannedPeak(0, 0, activations)
        slot, count = self.placement.slot_bytes, self.part.num_layers
        least = activations + self.part.rest_bytes(self.dtype) + RING * slot
        stay = {"stream": 0, "resident": count}.get(policy.mode, resident_within(budget, slot, RING, count))
        kept = min(self.placement.ram_budget(policy), slot * sum(part.num_layers for part in self.placement.parts))
        return PlannedPeak(least, least + stay * slot, kept)

    def _make_room(self, shortage: Shortage) -> None:
        """Models that ComfyUI has left on the device go before anything of this one."""
        device = comfy.model_management.get_torch_device()
        loaded = comfy.model_management.current_loaded_models
        own = self._model() if self._model is not None else None
        keep = [entry for entry in loaded if entry.model is not None and entry.model.model is own]
        comfy.model_management.free_memory(2 * shortage.margin, device, keep_loaded=keep)

    def _reserve(self) -> int:
        """Device bytes that the model's rest and the process need beside what sampling asks for."""
        return self.part.rest_bytes(self.dtype) + 2 * _HEADROOM + int(comfy.model_management.extra_reserved_memory())

    def _patcher(self) -> Any:
        model = self._model() if self._model is not None else None
        return getattr(model, "current_patcher", None)

    def _policy(self) -> Policy:
        patcher = self._patcher() or self.preparing
        return Policy() if patcher is None else patcher.attachments.get(POLICY_KEY, Policy())

    def _current_patches(self) -> dict[int, BlockPatches]:
        patcher = self._patcher() or self.preparing
        if patcher is None:
            return {}
        if self._patches[0] != patcher.patches_uuid:
            self._patches = (patcher.patches_uuid, lora.collect(patcher.patches, self.block_shapes()))
        return self._patches[1]

    def _patches_on(self, device: torch.device) -> PatchStore:
        """The patches of the clone in use; LoRA files stay where they are when only a strength has changed."""
        patches = self._current_patches()
        key = (self._patches[0], device)
        if self._patch_store is not None and self._patch_store[0] != key:
            before, store = self._patch_store
            same = before[1] == device and store.take_strengths(patches)
            if not same:
                store.close()
            self._patch_store = (key, store) if same else None
        if self._patch_store is None:
            keep = self._policy().mode == "resident"
            self._patch_store = key, PatchStore(patches, device, self.dtype, keep=keep)
        return self._patch_store[1]

    def _engine_attention(self, policy: Policy, x: torch.Tensor) -> AttentionBackend | None:
        """Measured, if need be, before the weights are on the device."""
        if policy.attention == "comfyui" or (policy.attention == "auto" and options.attention_chosen({})):
            return None
        choice = choose_attention(policy.attention, x.device, self.dtype, self.shape.head_dim, _tokens(x.shape))
        if choice.measured:
            logging.info("WanFit: attention %s", choice)
        return choice.backend

    def _call_settings(self, transformer_options: dict[str, Any]) -> ForwardSettings:
        attention = self._attention
        if attention is None or (self._policy().attention == "auto" and options.attention_chosen(transformer_options)):
            attention = options.attention_of(transformer_options)
        check = comfy.model_management.throw_exception_if_processing_interrupted
        return dataclasses.replace(self._settings, attention=attention, check_interrupt=check)


def _tokens(shape: Sequence[int]) -> int:
    """Of one video, from its latent's (B, C, T, H, W)."""
    _, _, frames, height, width = shape
    return frames * -(-height // 2) * -(-width // 2)


def _say(step: str) -> None:
    logging.info("WanFit: memory is short, going on with less: %s", step)


RUNTIMES: weakref.WeakSet[EngineRuntime] = weakref.WeakSet()
"""All that are alive, for the purge node."""
