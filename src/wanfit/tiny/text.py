"""A tiny random UMT5 encoder and its tokenizer, written in every layout that the community publishes.

The tokenizer is a real sentencepiece unigram model, trained on the spot, with UMT5's special ids, byte fallback and
NFKC charsmap. The layouts follow the published files name by name; only the sizes differ.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import save_file

from .kquants import quantize
from .spiece import charsmap, pieces, tokenizer_json, train_tokenizer


@dataclass(frozen=True)
class TinyShape:
    """Sizes of the tiny encoder. Each is a multiple of 32, so that every linear can be stored as Q8_0."""

    d_model: int = 4096
    d_ff: int = 128
    d_kv: int = 32
    num_heads: int = 2
    num_layers: int = 2
    vocab_rows: int = 384
    buckets: int = 32


@dataclass(frozen=True)
class TinyText:
    """A tiny encoder: float32 weights under Hugging Face names, and the serialised sentencepiece model."""

    shape: TinyShape
    weights: Mapping[str, torch.Tensor]
    spiece: bytes


def make_text(shape: TinyShape | None = None, seed: int = 0) -> TinyText:
    """A tiny encoder; the same seed gives the same bytes."""
    shape = shape or TinyShape()
    return TinyText(shape, dict(_random_weights(shape, seed)), train_tokenizer(shape.vocab_rows - 12))


def _random_weights(shape: TinyShape, seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)

    def normal(std: float, *size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator) * std

    inner = shape.num_heads * shape.d_kv
    yield "shared.weight", normal(1.0, shape.vocab_rows, shape.d_model)
    for index in range(shape.num_layers):
        block = f"encoder.block.{index}.layer"
        # UMT5 does not scale its scores: a small q keeps random attention from picking one token by rounding errors.
        for name, std in (("q", shape.d_kv**-0.5), ("k", 1.0), ("v", 1.0)):
            yield f"{block}.0.SelfAttention.{name}.weight", normal(std * shape.d_model**-0.5, inner, shape.d_model)
        yield f"{block}.0.SelfAttention.o.weight", normal(inner**-0.5, shape.d_model, inner)
        yield f"{block}.0.SelfAttention.relative_attention_bias.weight", normal(1, shape.buckets, shape.num_heads)
        yield f"{block}.0.layer_norm.weight", 1 + normal(0.1, shape.d_model)
        for name in ("wi_0", "wi_1"):
            yield f"{block}.1.DenseReluDense.{name}.weight", normal(shape.d_model**-0.5, shape.d_ff, shape.d_model)
        yield f"{block}.1.DenseReluDense.wo.weight", normal(shape.d_ff**-0.5, shape.d_model, shape.d_ff)
        yield f"{block}.1.layer_norm.weight", 1 + normal(0.1, shape.d_model)
    yield "encoder.final_layer_norm.weight", 1 + normal(0.1, shape.d_model)


def is_linear(name: str) -> bool:
    """Whether a Hugging Face name is a linear's weight: what published files quantise, besides the GGUF embedding."""
    return name.startswith("encoder.block.") and "norm" not in name and "relative_attention_bias" not in name


def write_comfy(text: TinyText, folder: Path, dtype: torch.dtype = torch.float16) -> Path:
    """Comfy-Org's 16-bit file: Hugging Face names and the tokenizer as `spiece_model`."""
    path = folder / f"umt5_xxl_{'bf16' if dtype is torch.bfloat16 else 'fp16'}.safetensors"
    save_file({**_cast(text.weights, dtype), "spiece_model": _as_tensor(text.spiece)}, path)
    return path


def write_comfy_fp8_scaled(text: TinyText, folder: Path) -> Path:
    """Comfy-Org's scaled fp8 file: each linear as e4m3 with one `scale_weight`, the rest 16-bit."""
    tensors = {
        "scaled_fp8": torch.empty(0, dtype=torch.float8_e4m3fn),
        "spiece_model": _as_tensor(text.spiece),
    }
    largest = torch.finfo(torch.float8_e4m3fn).max
    for name, weight in text.weights.items():
        if is_linear(name):
            scale = weight.abs().max() / largest
            tensors[name] = (weight / scale).clamp(-largest, largest).to(torch.float8_e4m3fn)
            tensors[name.removesuffix("weight") + "scale_weight"] = scale
        else:
            tensors[name] = weight.half()
    path = folder / "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
    save_file(tensors, path)
    return path


def write_kijai(text: TinyText, folder: Path, *, fp8: bool = False) -> Path:
    """Kijai's files: original Wan names, bf16 or plain fp8 linears, no tokenizer."""
    tensors = {
        wan_name(name): weight.to(torch.float8_e4m3fn if fp8 and is_linear(name) else torch.bfloat16)
        for name, weight in text.weights.items()
    }
    path = folder / f"umt5-xxl-enc-{'fp8_e4m3fn' if fp8 else 'bf16'}.safetensors"
    save_file(tensors, path)
    return path


def write_diffusers(text: TinyText, folder: Path, *, with_json: bool = True) -> Path:
    """A diffusers model folder's `text_encoder/` and `tokenizer/`; the path of `text_encoder/` is returned."""
    encoder, tokenizer = folder / "text_encoder", folder / "tokenizer"
    encoder.mkdir(parents=True)
    tokenizer.mkdir()
    save_file(dict(text.weights), encoder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["UMT5EncoderModel"],
        "model_type": "umt5",
        "vocab_size": text.shape.vocab_rows,
        "d_model": text.shape.d_model,
        "d_kv": text.shape.d_kv,
        "d_ff": text.shape.d_ff,
        "num_layers": text.shape.num_layers,
        "num_heads": text.shape.num_heads,
        "relative_attention_num_buckets": text.shape.buckets,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": 1e-6,
        "feed_forward_proj": "gated-gelu",
        "pad_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "float32",
    }
    (encoder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (tokenizer / "spiece.model").write_bytes(text.spiece)
    if with_json:
        tokenizer_json(text.spiece).save(str(tokenizer / "tokenizer.json"))
    return encoder


def write_gguf(
    text: TinyText,
    folder: Path,
    linear_type: str = "Q8_0",
    embedding_type: str | None = None,
    *,
    with_charsmap: bool = True,
) -> Path:
    """city96's GGUF: norms and relative bias F32, linears and embedding packed; tokenizer in the KV pairs.

    Args:
        linear_type: `Q8_0`, `Q4_K` ...; K types need a shape whose sizes are multiples of 256.
        embedding_type: the linears' when left out. Published K files use `Q6_K`.
        with_charsmap: leave out `tokenizer.ggml.precompiled_charsmap` when false, as some converters do.
    """
    path = folder / f"umt5-xxl-encoder-{linear_type}.gguf"
    writer = gguf.GGUFWriter(path, "t5encoder")
    shape = text.shape
    writer.add_context_length(512)
    writer.add_embedding_length(shape.d_model)
    writer.add_feed_forward_length(shape.d_ff)
    writer.add_block_count(shape.num_layers)
    writer.add_head_count(shape.num_heads)
    writer.add_key_length(shape.d_kv)
    writer.add_value_length(shape.d_kv)
    writer.add_layer_norm_eps(1e-6)
    writer.add_relative_attn_buckets_count(shape.buckets)
    writer.add_layer_norm_rms_eps(1e-6)
    _add_gguf_tokenizer(writer, text, with_charsmap)
    for name, weight in text.weights.items():
        array = weight.numpy()
        packed = linear_type if is_linear(name) else embedding_type or linear_type
        if name == "shared.weight" or is_linear(name):
            raw_dtype = gguf.GGMLQuantizationType[packed]
            writer.add_tensor(gguf_name(name), quantize(array, packed), raw_dtype=raw_dtype)
        else:
            writer.add_tensor(gguf_name(name), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_gguf_tokenizer(writer: gguf.GGUFWriter, text: TinyText, with_charsmap: bool) -> None:
    known = pieces(text.spiece)
    padding = text.shape.vocab_rows - len(known)
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([piece for piece, _, _ in known] + [f"[PAD{i}]" for i in range(padding)])
    writer.add_token_scores([score for _, score, _ in known] + [-10000.0] * padding)
    writer.add_token_types([kind for _, _, kind in known] + [5] * padding)
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    if with_charsmap:
        writer.add_precompiled_charsmap(charsmap(text.spiece))
    writer.add_eos_token_id(1)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(2)


_WAN_NAMES = (
    ("encoder.block.", "blocks."),
    ("layer.0.SelfAttention.relative_attention_bias", "pos_embedding.embedding"),
    ("layer.0.SelfAttention.", "attn."),
    ("layer.0.layer_norm", "norm1"),
    ("layer.1.layer_norm", "norm2"),
    ("layer.1.DenseReluDense.wi_0", "ffn.gate.0"),
    ("layer.1.DenseReluDense.wi_1", "ffn.fc1"),
    ("layer.1.DenseReluDense.wo", "ffn.fc2"),
    ("encoder.final_layer_norm", "norm"),
    ("shared", "token_embedding"),
)
_GGUF_NAMES = (
    ("encoder.block.", "enc.blk."),
    ("layer.0.SelfAttention.relative_attention_bias", "attn_rel_b"),
    ("layer.0.SelfAttention.", "attn_"),
    ("layer.0.layer_norm", "attn_norm"),
    ("layer.1.layer_norm", "ffn_norm"),
    ("layer.1.DenseReluDense.wi_0", "ffn_gate"),
    ("layer.1.DenseReluDense.wi_1", "ffn_up"),
    ("layer.1.DenseReluDense.wo", "ffn_down"),
    ("encoder.final_layer_norm", "enc.output_norm"),
    ("shared", "token_embd"),
)


def wan_name(name: str) -> str:
    """Hugging Face name to the name in Wan's original file."""
    return _replace(name, _WAN_NAMES)


def gguf_name(name: str) -> str:
    """Hugging Face name to the name in a GGUF file."""
    return _replace(name, _GGUF_NAMES)


def _replace(name: str, table: tuple[tuple[str, str], ...]) -> str:
    for ours, theirs in table:
        name = name.replace(ours, theirs)
    return name


def _cast(weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: weight.to(dtype) for name, weight in weights.items()}


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
