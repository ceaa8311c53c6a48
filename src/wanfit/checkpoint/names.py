"""Tensor names: the canonical ones, and the other conventions of the same models.

Canonical is what the original Wan repositories call the transformer's and the VAE's tensors, and what Hugging
Face calls those of UMT5. Every rule is anchored: a name that no rule matches as a whole is not of the model.

Source: the key maps of diffusers' scripts/convert_wan_to_diffusers.py, Apache-2.0, checked as bijections onto
the state dicts of the full-size models in tests/unit/checkpoint/test_names.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cache

from .structure import transformer_tensors, vae_tensors

# original module -> diffusers module
_TRANSFORMER = {
    "patch_embedding": "patch_embedding",
    "text_embedding.0": "condition_embedder.text_embedder.linear_1",
    "text_embedding.2": "condition_embedder.text_embedder.linear_2",
    "time_embedding.0": "condition_embedder.time_embedder.linear_1",
    "time_embedding.2": "condition_embedder.time_embedder.linear_2",
    "time_projection.1": "condition_embedder.time_proj",
    "head.head": "proj_out",
    "head.modulation": "scale_shift_table",
    "img_emb.proj.0": "condition_embedder.image_embedder.norm1",
    "img_emb.proj.1": "condition_embedder.image_embedder.ff.net.0.proj",
    "img_emb.proj.3": "condition_embedder.image_embedder.ff.net.2",
    "img_emb.proj.4": "condition_embedder.image_embedder.norm2",
    "img_emb.emb_pos": "condition_embedder.image_embedder.pos_embed",
}
_TRANSFORMER_BLOCK = {
    "self_attn.q": "attn1.to_q",
    "self_attn.k": "attn1.to_k",
    "self_attn.v": "attn1.to_v",
    "self_attn.o": "attn1.to_out.0",
    "self_attn.norm_q": "attn1.norm_q",
    "self_attn.norm_k": "attn1.norm_k",
    "cross_attn.q": "attn2.to_q",
    "cross_attn.k": "attn2.to_k",
    "cross_attn.v": "attn2.to_v",
    "cross_attn.o": "attn2.to_out.0",
    "cross_attn.norm_q": "attn2.norm_q",
    "cross_attn.norm_k": "attn2.norm_k",
    "cross_attn.k_img": "attn2.add_k_proj",
    "cross_attn.v_img": "attn2.add_v_proj",
    "cross_attn.norm_k_img": "attn2.norm_added_k",
    "ffn.0": "ffn.net.0.proj",
    "ffn.2": "ffn.net.2",
    "norm3": "norm2",  # the only block norm with weights; diffusers' own norm1 and norm3 have none
    "modulation": "scale_shift_table",
}
# Hugging Face module inside a block -> (Wan original, GGUF)
_UMT5_BLOCK = {
    "layer.0.SelfAttention.q": ("attn.q", "attn_q"),
    "layer.0.SelfAttention.k": ("attn.k", "attn_k"),
    "layer.0.SelfAttention.v": ("attn.v", "attn_v"),
    "layer.0.SelfAttention.o": ("attn.o", "attn_o"),
    "layer.0.SelfAttention.relative_attention_bias": ("pos_embedding.embedding", "attn_rel_b"),
    "layer.0.layer_norm": ("norm1", "attn_norm"),
    "layer.1.layer_norm": ("norm2", "ffn_norm"),
    "layer.1.DenseReluDense.wi_0": ("ffn.gate.0", "ffn_gate"),
    "layer.1.DenseReluDense.wi_1": ("ffn.fc1", "ffn_up"),
    "layer.1.DenseReluDense.wo": ("ffn.fc2", "ffn_down"),
}
_UMT5 = {
    "shared.weight": ("token_embedding.weight", "token_embd.weight"),
    "encoder.final_layer_norm.weight": ("norm.weight", "enc.output_norm.weight"),
}
_VAE_RESIDUAL = {
    "residual.0": "norm1",
    "residual.2": "conv1",
    "residual.3": "norm2",
    "residual.6": "conv2",
    "shortcut": "conv_shortcut",
}
_VAE = {
    "conv1": "quant_conv",
    "conv2": "post_quant_conv",
    "encoder.conv1": "encoder.conv_in",
    "decoder.conv1": "decoder.conv_in",
    "encoder.head.0": "encoder.norm_out",
    "decoder.head.0": "decoder.norm_out",
    "encoder.head.2": "encoder.conv_out",
    "decoder.head.2": "decoder.conv_out",
    "encoder.middle.1.norm": "encoder.mid_block.attentions.0.norm",
    "encoder.middle.1.to_qkv": "encoder.mid_block.attentions.0.to_qkv",
    "encoder.middle.1.proj": "encoder.mid_block.attentions.0.proj",
    "decoder.middle.1.norm": "decoder.mid_block.attentions.0.norm",
    "decoder.middle.1.to_qkv": "decoder.mid_block.attentions.0.to_qkv",
    "decoder.middle.1.proj": "decoder.mid_block.attentions.0.proj",
}

_BLOCK = re.compile(r"(?P<list>blocks|encoder\.block|enc\.blk)\.(?P<index>0|[1-9]\d{0,3})\.(?P<rest>.+)")
_LEAF = re.compile(r"(?P<module>.+?)(?P<leaf>\.(?:weight|bias|gamma))?")
_VAE_MIDDLE = re.compile(r"(?P<part>encoder|decoder)\.middle\.(?P<index>[02])\.(?P<rest>.+)")
_VAE_FLAT = re.compile(r"(?P<part>encoder\.down|decoder\.up)samples\.(?P<index>\d{1,2})\.(?P<rest>[a-z].*)")
_VAE_NESTED = re.compile(
    r"(?P<part>encoder\.down|decoder\.up)samples\.(?P<stage>\d)\.(?:down|up)samples\.(?P<index>\d)\.(?P<rest>.+)"
)


def to_diffusers_transformer(name: str) -> str:
    """Canonical to diffusers name of a transformer tensor.

    Raises:
        KeyError: not a canonical transformer name.
    """
    if match := _BLOCK.fullmatch(name):
        if match["list"] != "blocks":
            raise KeyError(name)
        return f"blocks.{match['index']}.{_rename(match['rest'], _TRANSFORMER_BLOCK)}"
    return _rename(name, _TRANSFORMER)


def to_diffusers_vae(name: str, variant: str) -> str:
    """Canonical to diffusers name of a VAE tensor; `variant` is vae-2.1 or vae-2.2.

    Raises:
        KeyError: not a canonical name of that VAE.
    """
    if match := _VAE_MIDDLE.fullmatch(name):
        rest = _rename(match["rest"], _VAE_RESIDUAL)
        return f"{match['part']}.mid_block.resnets.{int(match['index']) // 2}.{rest}"
    if match := _VAE_NESTED.fullmatch(name):
        if variant != "vae-2.2":
            raise KeyError(name)
        blocks = f"{match['part']}_blocks.{match['stage']}"
        if _is_resample(match["rest"]):
            sampler = "downsampler" if match["part"] == "encoder.down" else "upsampler"
            return f"{blocks}.{sampler}.{match['rest']}"
        return f"{blocks}.resnets.{match['index']}.{_rename(match['rest'], _VAE_RESIDUAL)}"
    if match := _VAE_FLAT.fullmatch(name):
        if variant != "vae-2.1":
            raise KeyError(name)
        return _flat_block(match["part"], int(match["index"]), match["rest"])
    return _rename(name, _VAE)


def _flat_block(part: str, index: int, rest: str) -> str:
    resample = _is_resample(rest)
    renamed = rest if resample else _rename(rest, _VAE_RESIDUAL)
    if part == "encoder.down":
        return f"encoder.down_blocks.{index}.{renamed}"
    stage, place = divmod(index, 4)
    if resample:
        return f"decoder.up_blocks.{stage}.upsamplers.0.{renamed}"
    return f"decoder.up_blocks.{stage}.resnets.{place}.{renamed}"


def _is_resample(rest: str) -> bool:
    return rest.startswith(("resample.1.", "time_conv."))


def _rename(name: str, table: Mapping[str, str]) -> str:
    match = _LEAF.fullmatch(name)
    if match is None or match["module"] not in table:
        raise KeyError(name)
    return table[match["module"]] + (match["leaf"] or "")


class Convention:
    """One way of naming the tensors of one kind of model.

    Args:
        kind: transformer, vae or text_encoder.
        title: for messages: `original`, `diffusers` ...
        variant: of a VAE, which the names tell; else empty.
        fixed: stored name -> canonical name.
        block_list: stored name of the list of blocks, and its canonical name.
        block: stored name inside a block -> canonical name inside a block.
    """

    def __init__(
        self,
        kind: str,
        title: str,
        fixed: Mapping[str, str],
        block_list: tuple[str, str] = ("", ""),
        block: Mapping[str, str] | None = None,
        variant: str = "",
    ) -> None:
        self.kind, self.title, self.variant = kind, title, variant
        self._fixed, self._list, self._block = fixed, block_list, block or {}

    def canonical(self, name: str) -> str | None:
        """The canonical name, or None when the model has no such tensor."""
        if fixed := self._fixed.get(name):
            return fixed
        match = _BLOCK.fullmatch(name)
        if match is None or match["list"] != self._list[0] or match["rest"] not in self._block:
            return None
        return f"{self._list[1]}.{match['index']}.{self._block[match['rest']]}"

    def count(self, names: Iterable[str]) -> int:
        """How many of the names are of this convention."""
        return sum(self.canonical(name) is not None for name in names)


@cache
def conventions() -> tuple[Convention, ...]:
    """All naming conventions that are read."""
    tensors = transformer_tensors(
        dim=1, ffn_dim=1, num_layers=1, in_channels=1, out_channels=1, text_dim=1, freq_dim=1, image_dim=1,
        image_positions=1,
    )  # fmt: skip
    fixed = [n for n in tensors if not n.startswith("blocks.")]
    block = [n.removeprefix("blocks.0.") for n in tensors if n.startswith("blocks.")]
    result = [
        Convention("transformer", "original", {n: n for n in fixed}, ("blocks", "blocks"), {n: n for n in block}),
        Convention(
            "transformer",
            "diffusers",
            {to_diffusers_transformer(n): n for n in fixed},
            ("blocks", "blocks"),
            {_rename(n, _TRANSFORMER_BLOCK): n for n in block},
        ),
    ]
    for variant in ("vae-2.1", "vae-2.2"):
        vae = vae_tensors(variant, base_dim=2, decoder_base_dim=2, latent_channels=1, pixel_channels=1)
        result.append(Convention("vae", "original", {n: n for n in vae}, variant=variant))
        result.append(Convention("vae", "diffusers", {to_diffusers_vae(n, variant): n for n in vae}, variant=variant))
    hf = {n: n for n in _UMT5} | {"encoder.embed_tokens.weight": "shared.weight"}
    lists = ("encoder.block", "blocks", "enc.blk")
    for column, title in enumerate(("Hugging Face", "original", "GGUF")):
        result.append(
            Convention(
                "text_encoder",
                title,
                {(n, *other)[column]: n for n, other in _UMT5.items()} if column else hf,
                (lists[column], "encoder.block"),
                {f"{(n, *other)[column]}.weight": f"{n}.weight" for n, other in _UMT5_BLOCK.items()},
            )
        )
    return tuple(result)
