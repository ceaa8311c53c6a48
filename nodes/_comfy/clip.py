"""UMT5 as ComfyUI's CLIP: its own loader for safetensors, stored weights for GGUF."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import comfy.ops
import comfy.sd
import comfy.utils
import folder_paths
import torch
from safetensors import safe_open
from torch import nn

from ...src.wanfit.checkpoint import TITLES, Checkpoint, open_checkpoint
from ...src.wanfit.errors import CheckpointError, InputError
from ...src.wanfit.pipeline.text.spm import model_from_gguf
from ...src.wanfit.quant import StoredWeight, dequantize, gather_rows, linear
from . import errors, folders

_WORDS = {"text": "device of WanFit Load Text Encoder", "text_encoder": "text_encoder"}

_LAYERS, _DIM, _FFN = 24, 4096, 10240
"""Of the UMT5-XXL that ComfyUI builds, and that it recognises by the last two."""


def load(name: str, device: str) -> Any:
    """A CLIP for Wan. `device`: default or cpu.

    Raises:
        CheckpointError, QuantError: as `open_checkpoint`. InputError: pair_mismatch for another kind of model.
    """
    path = folders.find("text_encoders", name, "text_encoder")
    checkpoint = open_checkpoint(path)
    if checkpoint.identity.kind != "text_encoder":
        raise InputError(
            "pair_mismatch",
            "load",
            f"<text_encoder> is a {TITLES[checkpoint.identity.variant]}",
            "Give a umt5_xxl file",
        )
    options: dict[str, Any] = {}
    if device == "cpu":
        options["load_device"] = options["offload_device"] = torch.device("cpu")
    if checkpoint.container == "gguf":
        return explaining(_stored(checkpoint, options))
    _refuse_new_formats_on_old_core(path, checkpoint)
    embeddings = folder_paths.get_folder_paths("embeddings")
    return explaining(comfy.sd.load_clip([str(path)], embeddings, comfy.sd.CLIPType.WAN, model_options=options))


class ExplainedClip(comfy.sd.CLIP):
    """A CLIP whose failures of memory say their cause in whatever node it is used, CLIPTextEncode above all."""

    def encode_from_tokens(self, *args: Any, **kwargs: Any) -> Any:
        with errors.in_words_of(_WORDS, "text"):
            return super().encode_from_tokens(*args, **kwargs)

    def encode_from_tokens_scheduled(self, *args: Any, **kwargs: Any) -> Any:
        with errors.in_words_of(_WORDS, "text"):
            return super().encode_from_tokens_scheduled(*args, **kwargs)

    def clone(self, *args: Any, **kwargs: Any) -> Any:
        return explaining(super().clone(*args, **kwargs))


def explaining(clip: Any) -> Any:
    """The same CLIP as an `ExplainedClip`: ComfyUI's loaders and `clone` name their class themselves."""
    if type(clip) is comfy.sd.CLIP:
        clip.__class__ = ExplainedClip
    return clip


def _refuse_new_formats_on_old_core(path: Path, checkpoint: Checkpoint) -> None:
    """Cores before 0.3.71 read files with `comfy_quant` scales without an error and compute garbage."""
    if hasattr(comfy.utils, "detect_layer_quantization"):
        return
    with safe_open(str(path), "pt") as file:
        names = list(file.keys())
    if "_quantization_metadata" in checkpoint.metadata or any(name.endswith(".comfy_quant") for name in names):
        raise CheckpointError(
            "file_unsupported",
            "load",
            f"<text_encoder> {path.name} has a newer quantisation (comfy_quant) than this ComfyUI can read",
            "Update ComfyUI, or use umt5_xxl_fp8_e4m3fn_scaled.safetensors",
        )


class StoredModule(nn.Module):
    """A linear or an embedding without memory of its own until `fill`; then the file's stored bytes.

    The bytes are buffers, so ComfyUI counts and moves them. Back in RAM they are views of the file's memory map
    again, not copies.
    """

    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.mapped: StoredWeight | None = None

    def fill(self, weight: StoredWeight) -> None:
        """Take over a stored weight; the buffers are views of its memory map."""
        self.mapped = weight
        self.register_buffer("data", weight.data, persistent=True)
        for role, tensor in weight.params.items():
            self.register_buffer(f"param_{role}", tensor, persistent=True)

    def stored_on(self, device: torch.device) -> StoredWeight:
        """The stored weight on `device`: itself when it is there already."""
        mapped = self.mapped
        if mapped is None:
            raise CheckpointError("tensors_missing", "text", "a part of the text encoder was not in its file")
        params = {role: self.get_buffer(f"param_{role}") for role in mapped.params}
        return StoredWeight(mapped.format, mapped.shape, self.get_buffer("data"), params, mapped.options).to(device)

    def _apply(self, fn: Any, recurse: bool = True) -> StoredModule:
        super()._apply(fn, recurse)
        if self.mapped is not None and self.get_buffer("data").device.type == "cpu":
            self.fill(self.mapped)
        return self

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *_: Any) -> None:
        state_dict.pop(prefix + "weight", None)


class StoredOps(comfy.ops.manual_cast):
    """ComfyUI's layers, with the large ones over stored weights."""

    class Linear(StoredModule):
        """`x @ W.T` in x's dtype."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return linear(x, self.stored_on(x.device))

    class Embedding(StoredModule):
        """The rows asked for, dequantised."""

        @property
        def weight(self) -> torch.Tensor:
            """The stored bytes: ComfyUI asks where they are."""
            return self.get_buffer("data")

        def forward(self, index: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
            rows = gather_rows(self.stored_on(self.get_buffer("data").device), index, out_dtype or torch.float32)
            return rows.to(index.device)


def _stored(checkpoint: Checkpoint, options: dict[str, Any]) -> Any:
    if checkpoint.identity.num_layers != _LAYERS:
        raise CheckpointError(
            "model_unsupported",
            "load",
            f"<text_encoder> has {checkpoint.identity.num_layers} layers; UMT5-XXL has {_LAYERS}",
            "Use a umt5-xxl encoder file",
        )
    loader = comfy.sd.load_text_encoder_state_dicts
    more = {"disable_dynamic": True} if "disable_dynamic" in inspect.signature(loader).parameters else {}
    clip = loader(
        [_state_dict(checkpoint)],
        embedding_directory=folder_paths.get_folder_paths("embeddings"),
        clip_type=comfy.sd.CLIPType.WAN,
        model_options={**options, "custom_operations": StoredOps},
        **more,
    )
    for name, module in clip.cond_stage_model.umt5xxl.transformer.named_modules():
        if isinstance(module, StoredModule):
            module.fill(checkpoint.load(f"{name}.weight"))
    clip.patcher.size = 0
    clip.patcher.model_size()
    return clip


def _state_dict(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """Norms as tensors, everything large as a placeholder, and the tokenizer."""
    recognised_by = f"encoder.block.{_LAYERS - 1}.layer.1.DenseReluDense.wi_1.weight"
    tensors: dict[str, torch.Tensor] = {}
    for name, info in checkpoint.tensors.items():
        large = not name.endswith("layer_norm.weight")
        tensors[name] = (
            torch.empty(info.shape, dtype=torch.float16, device="meta")
            if large
            else dequantize(checkpoint.load(name), torch.float32)
        )
    tensors[recognised_by] = torch.empty(_FFN, _DIM, dtype=torch.float16, device="meta")
    proto = model_from_gguf(checkpoint.metadata, checkpoint.path.name)
    tensors["spiece_model"] = torch.frombuffer(bytearray(proto), dtype=torch.uint8)
    return tensors
