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
    BlockShape,
    ForwardSettings,
    LowRank,
    WeightSource,
    choose_attention,
    require_finite,
)
from ...src.wanfit.checkpoint import Checkpoint
from ...src.wanfit.memory.alarm import Alarm, Shortage
from ...src.wanfit.memory.machine import Machine
from ...src.wanfit.memory.plan import CHUNK_TOKENS
from ...src.wanfit.offload import Ladder
from ...src.wanfit.quant import StoredWeight
from ...src.wanfit.quant.float8_matmul import float8_units
from ...src.wanfit.quant.triton_support import triton_refusal
from . import options
from .demand import Demand
from .patches import CurrentPatches
from .placement import Placement
from .policy import Policy
from .prompt_record import RECORDER

POLICY_KEY = "wanfit_policy"


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
        self.block_shapes = {
            name: info.shape for name, info in checkpoint.tensors.items() if name.startswith("blocks.")
        }
        """Shape of every block tensor, by canonical name."""
        self.preparing: Any = None
        """The clone that is about to sample, while ComfyUI asks for `memory_required`."""
        self._expert = expert
        self._settings = ForwardSettings(CHUNK_TOKENS)
        self._ladder: Ladder | None = None
        self.alarm: Alarm | None = None
        """Asked before each block; made for the first forward on a device."""
        self._model: weakref.ref[Any] | None = None
        self._source: tuple[torch.device, WeightSource] | None = None
        self._demand = Demand(placement.parts[expert], placement)
        self._patches = CurrentPatches(self.block_shapes, dtype)
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
            activations = self._activations(x.shape, x.device)
            budget = self._demand.weight_budget(activations, policy, x.device)
            self._source = x.device, self.placement.source(self._expert, x.device, policy, budget)
            self._settings = ForwardSettings(CHUNK_TOKENS, float8_matmul=None if policy.fp8_matmul else False)
            RECORDER.expect(self._demand.peak(activations, policy, x.device, self.dtype, budget))
        if self.alarm is None or self.alarm.device != x.device:
            self.alarm = Alarm(x.device)
        self._ladder = Ladder(self._settings, self.placement.store, _say, self.alarm, self._make_room)
        output = self._ladder.run(run)
        what = "the model's result became NaN or infinite"
        require_finite(output, what, dtype=self.dtype, patched=bool(self._patches.of(self._clone())), given=x)
        return output

    @contextmanager
    def onload(self, index: int, device: torch.device, transformer_options: dict[str, Any]) -> Iterator[BlockCall]:
        """Everything for block `index`'s forward on `device`, patches of the clone in use applied."""
        if self._source is None or self._ladder is None:
            raise RuntimeError("a block ran outside of its model's forward")
        self._settings = self._ladder.next_block()
        settings = self._call_settings(transformer_options)
        lora = self._patches.on(self._clone(), device, keep=self._keeps_patches())
        with self._source[1].onload(index) as weights, lora.onload(index) as patches:
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
        activations = self._activations(input_shape, device)
        if self._patcher() is not None or self.machine(device).device == "cpu":
            return activations
        return self._demand.required(activations, self._policy(), device, self.dtype)

    def floor_bytes(self) -> int:
        """Device bytes without which no forward is possible, however small the video."""
        device = comfy.model_management.get_torch_device()
        return self._demand.with_slots(self._activations(self._demand.smallest, device))

    def release(self) -> None:
        """Give up all device memory; the next forward takes it again."""
        self._source = self._rotary = self._ladder = None
        self._patches.release_device()
        self.placement.release_device()

    def release_host(self) -> int:
        """Give up copies of blocks and LoRAs in RAM too; returns their bytes."""
        self._source = self._rotary = self._ladder = None
        return self._patches.release_host() + self.placement.release_host()

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

    def _activations(self, input_shape: Sequence[int], device: torch.device) -> int:
        """One forward as the engine plans it, and LoRAs; weights as stored not counted."""
        loras = self._patches.nbytes(self._clone(), keep=self._keeps_patches())
        return self._demand.forward(input_shape, self.machine(device), loras=loras > 0) + loras

    def _make_room(self, shortage: Shortage) -> None:
        """Models that ComfyUI has left on the device go before anything of this one."""
        device = comfy.model_management.get_torch_device()
        loaded = comfy.model_management.current_loaded_models
        own = self._model() if self._model is not None else None
        keep = [entry for entry in loaded if entry.model is not None and entry.model.model is own]
        comfy.model_management.free_memory(2 * shortage.margin, device, keep_loaded=keep)

    def _patcher(self) -> Any:
        model = self._model() if self._model is not None else None
        return getattr(model, "current_patcher", None)

    def _clone(self) -> Any:
        """The clone that samples, or is about to."""
        return self._patcher() or self.preparing

    def _keeps_patches(self) -> bool:
        return self._policy().mode == "resident"

    def _policy(self) -> Policy:
        patcher = self._clone()
        return Policy() if patcher is None else patcher.attachments.get(POLICY_KEY, Policy())

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
