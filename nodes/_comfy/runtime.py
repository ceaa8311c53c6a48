"""The engine behind one model: its open file, its blocks' weights, what it does with memory."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import comfy.model_management
import torch

from ...src.wanfit.blocks import BlockShape, ForwardSettings, activation_bytes, sdpa
from ...src.wanfit.checkpoint import Checkpoint
from ...src.wanfit.offload import MappedBlocks
from ...src.wanfit.quant import StoredWeight
from . import lora, options
from .policy import Policy

CHUNK_TOKENS = 4096
POLICY_KEY = "wanfit_policy"


@dataclass(frozen=True)
class BlockCall:
    """What one block forward needs besides its tensors."""

    weights: Mapping[str, StoredWeight]
    adapters: Mapping[str, Sequence[Any]]
    settings: ForwardSettings


class EngineRuntime:
    """Shared by a model and all its clones. Holds no strong reference to the model.

    Args:
        checkpoint: of a transformer; this object closes it when it goes.
        dtype: compute dtype.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype) -> None:
        identity = checkpoint.identity
        self.checkpoint, self.identity, self.dtype = checkpoint, identity, dtype
        self.shape = BlockShape(identity.dim, identity.num_heads, identity.ffn_dim)
        self.policy = Policy()
        self._model: weakref.ref[Any] | None = None
        self._source: MappedBlocks | None = None
        self._source_device: torch.device | None = None
        self._patches: tuple[Any, dict[int, lora.BlockPatches]] = (None, {})
        self._rotary: tuple[weakref.ref[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] | None = None

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

    @contextmanager
    def onload(self, index: int, device: torch.device, transformer_options: dict[str, Any]) -> Iterator[BlockCall]:
        """Everything for block `index`'s forward on `device`, patches of the clone in use applied."""
        patches = self._current_patches().get(index)
        settings = self._settings(transformer_options)
        with self._source_on(device).onload(index) as weights:
            if patches is None:
                yield BlockCall(weights, {}, settings)
            else:
                adapters = lora.adapters_on(patches, device, self.dtype)
                yield BlockCall(lora.PatchedWeights(weights, patches, self.dtype), adapters, settings)

    def rotary(self, freqs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """ComfyUI's rotation matrices (1, N, 1, D/2, 2, 2) as (cos, sin), each (1, N, 1, D); kept for one forward."""
        if self._rotary is None or self._rotary[0]() is not freqs:
            turn = tuple(freqs[..., row, 0].repeat_interleave(2, dim=-1) for row in (0, 1))
            self._rotary = (weakref.ref(freqs), (turn[0], turn[1]))
        return self._rotary[1]

    def memory_required(self, input_shape: Sequence[int], cond_shapes: Mapping[str, Any] | None = None) -> int:
        """Bytes that sampling will allocate on the device besides the model's small rest.

        ComfyUI frees that much before it samples, and decides with it how many conditionings go in one batch.

        Args:
            input_shape: of the latent, (B, C, T, H, W).
        """
        batch, _, frames, height, width = input_shape
        tokens = frames * -(-height // 2) * -(-width // 2)
        itemsize = torch.finfo(self.dtype).bits // 8
        settings = ForwardSettings(CHUNK_TOKENS)
        activations = activation_bytes(self.shape, settings, batch=batch, tokens=tokens, itemsize=itemsize)
        rotary = 3 * tokens * self.shape.head_dim * 4
        dequantized = 2 * self.shape.dim * max(self.shape.ffn_dim, 2 * self.shape.dim) * itemsize
        return activations + rotary + dequantized + self._largest_block()

    def release(self) -> None:
        """Give up all device memory; the next forward takes it again."""
        self._source = self._source_device = self._rotary = None

    def _largest_block(self) -> int:
        totals: dict[str, int] = {}
        for name, info in self.checkpoint.tensors.items():
            if name.startswith("blocks."):
                index = name.split(".")[1]
                totals[index] = totals.get(index, 0) + info.nbytes
        return max(totals.values())

    def _source_on(self, device: torch.device) -> MappedBlocks:
        if self._source is None or self._source_device != device:
            self._source, self._source_device = MappedBlocks(self.checkpoint, device), device
        return self._source

    def _patcher(self) -> Any:
        model = self._model() if self._model is not None else None
        return getattr(model, "current_patcher", None)

    def _current_patches(self) -> dict[int, lora.BlockPatches]:
        patcher = self._patcher()
        if patcher is None:
            return {}
        if self._patches[0] != patcher.patches_uuid:
            self._patches = (patcher.patches_uuid, lora.collect(patcher.patches, self.block_shapes()))
        return self._patches[1]

    def _settings(self, transformer_options: dict[str, Any]) -> ForwardSettings:
        patcher = self._patcher()
        policy = self.policy if patcher is None else patcher.attachments.get(POLICY_KEY, self.policy)
        attention = options.attention_of(transformer_options) if policy.attention == "comfyui" else sdpa
        return ForwardSettings(
            CHUNK_TOKENS, attention, comfy.model_management.throw_exception_if_processing_interrupted
        )
