"""The tensors that each model has, by canonical name, with their logical shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

Shape = tuple[int, ...]

VAE_MULTIPLIERS = (1, 2, 4, 4)
VAE_BLOCKS = 2
_HEAD_DIM = 128


def transformer_tensors(
    *,
    dim: int,
    ffn_dim: int,
    num_layers: int,
    in_channels: int,
    out_channels: int,
    text_dim: int,
    freq_dim: int,
    image_dim: int = 0,
    image_positions: int = 0,
) -> dict[str, Shape]:
    """Tensors of a Wan transformer; `image_dim` 0 for a model without CLIP image embedding (`img_emb`).

    `image_positions`: rows of `img_emb.emb_pos` (514 in FLF2V), 0 for none.
    """
    tensors: dict[str, Shape] = {
        "patch_embedding.weight": (dim, in_channels, 1, 2, 2),
        "patch_embedding.bias": (dim,),
        "head.modulation": (1, 2, dim),
    }
    tensors.update(_linear("text_embedding.0", dim, text_dim))
    tensors.update(_linear("text_embedding.2", dim, dim))
    tensors.update(_linear("time_embedding.0", dim, freq_dim))
    tensors.update(_linear("time_embedding.2", dim, dim))
    tensors.update(_linear("time_projection.1", 6 * dim, dim))
    tensors.update(_linear("head.head", 4 * out_channels, dim))
    if image_dim:
        tensors.update(_norm("img_emb.proj.0", image_dim))
        tensors.update(_linear("img_emb.proj.1", image_dim, image_dim))
        tensors.update(_linear("img_emb.proj.3", dim, image_dim))
        tensors.update(_norm("img_emb.proj.4", dim))
    if image_positions:
        tensors["img_emb.emb_pos"] = (1, image_positions, image_dim)
    block = _transformer_block(dim, ffn_dim, bool(image_dim))
    for index in range(num_layers):
        tensors.update({f"blocks.{index}.{name}": shape for name, shape in block.items()})
    return tensors


def _transformer_block(dim: int, ffn_dim: int, image: bool) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {"modulation": (1, 6, dim)}
    for attention in ("self_attn", "cross_attn"):
        for linear in "qkvo":
            tensors.update(_linear(f"{attention}.{linear}", dim, dim))
        tensors[f"{attention}.norm_q.weight"] = (dim,)
        tensors[f"{attention}.norm_k.weight"] = (dim,)
    if image:
        tensors.update(_linear("cross_attn.k_img", dim, dim))
        tensors.update(_linear("cross_attn.v_img", dim, dim))
        tensors["cross_attn.norm_k_img.weight"] = (dim,)
    tensors.update(_norm("norm3", dim))
    tensors.update(_linear("ffn.0", ffn_dim, dim))
    tensors.update(_linear("ffn.2", dim, ffn_dim))
    return tensors


def umt5_tensors(
    *, vocab: int, dim: int, inner_dim: int, ffn_dim: int, num_heads: int, num_layers: int, buckets: int
) -> dict[str, Shape]:
    """Tensors of the UMT5 encoder. Unlike T5, every layer has its own relative position bias."""
    tensors: dict[str, Shape] = {"shared.weight": (vocab, dim), "encoder.final_layer_norm.weight": (dim,)}
    for index in range(num_layers):
        attention = f"encoder.block.{index}.layer.0"
        feed_forward = f"encoder.block.{index}.layer.1"
        for name in "qkv":
            tensors[f"{attention}.SelfAttention.{name}.weight"] = (inner_dim, dim)
        tensors[f"{attention}.SelfAttention.o.weight"] = (dim, inner_dim)
        tensors[f"{attention}.SelfAttention.relative_attention_bias.weight"] = (buckets, num_heads)
        tensors[f"{attention}.layer_norm.weight"] = (dim,)
        tensors[f"{feed_forward}.layer_norm.weight"] = (dim,)
        tensors[f"{feed_forward}.DenseReluDense.wi_0.weight"] = (ffn_dim, dim)
        tensors[f"{feed_forward}.DenseReluDense.wi_1.weight"] = (ffn_dim, dim)
        tensors[f"{feed_forward}.DenseReluDense.wo.weight"] = (dim, ffn_dim)
    return tensors


def vae_tensors(
    variant: str, *, base_dim: int, decoder_base_dim: int, latent_channels: int, pixel_channels: int
) -> dict[str, Shape]:
    """Tensors of a Wan VAE; `variant` is vae-2.1 (flat block lists) or vae-2.2 (nested ones)."""
    nested = variant == "vae-2.2"
    tensors: dict[str, Shape] = {}
    tensors.update(_conv3("conv1", 2 * latent_channels, 2 * latent_channels, 1))
    tensors.update(_conv3("conv2", latent_channels, latent_channels, 1))
    widths = [base_dim * m for m in (1, *VAE_MULTIPLIERS)]
    tensors.update(_conv3("encoder.conv1", widths[0], pixel_channels, 3))
    tensors.update(_encoder_blocks(widths, nested))
    tensors.update(_vae_ends("encoder", widths[-1], widths[-1], 2 * latent_channels))
    widths = [decoder_base_dim * m for m in (VAE_MULTIPLIERS[-1], *VAE_MULTIPLIERS[::-1])]
    tensors.update(_conv3("decoder.conv1", widths[0], latent_channels, 3))
    tensors.update(_vae_ends("decoder", widths[0], widths[-1], pixel_channels))
    tensors.update(_decoder_blocks(widths, nested))
    return tensors


def _encoder_blocks(widths: list[int], nested: bool) -> Iterator[tuple[str, Shape]]:
    flat = 0
    for stage in range(4):
        channels, out = widths[stage], widths[stage + 1]
        for index in range(VAE_BLOCKS + (stage < 3)):
            name = f"encoder.downsamples.{stage}.downsamples.{index}" if nested else f"encoder.downsamples.{flat}"
            if index < VAE_BLOCKS:
                yield from _residual(name, channels, out).items()
            else:
                yield from _resample(name, out, out, out if stage else 0).items()
            channels, flat = out, flat + 1


def _decoder_blocks(widths: list[int], nested: bool) -> Iterator[tuple[str, Shape]]:
    flat = 0
    for stage in range(4):
        channels, out = widths[stage], widths[stage + 1]
        if stage and not nested:
            channels //= 2
        for index in range(VAE_BLOCKS + 1 + (stage < 3)):
            name = f"decoder.upsamples.{stage}.upsamples.{index}" if nested else f"decoder.upsamples.{flat}"
            if index <= VAE_BLOCKS:
                yield from _residual(name, channels, out).items()
            else:
                spatial = out if nested else out // 2
                yield from _resample(name, out, spatial, 2 * out if stage < 2 else 0).items()
            channels, flat = out, flat + 1


def _vae_ends(part: str, middle: int, head: int, out: int) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {
        f"{part}.middle.1.norm.gamma": (middle, 1, 1),
        f"{part}.middle.1.to_qkv.weight": (3 * middle, middle, 1, 1),
        f"{part}.middle.1.to_qkv.bias": (3 * middle,),
        f"{part}.middle.1.proj.weight": (middle, middle, 1, 1),
        f"{part}.middle.1.proj.bias": (middle,),
        f"{part}.head.0.gamma": (head, 1, 1, 1),
    }
    tensors.update(_residual(f"{part}.middle.0", middle, middle))
    tensors.update(_residual(f"{part}.middle.2", middle, middle))
    tensors.update(_conv3(f"{part}.head.2", out, head, 3))
    return tensors


def _residual(name: str, channels: int, out: int) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {
        f"{name}.residual.0.gamma": (channels, 1, 1, 1),
        f"{name}.residual.3.gamma": (out, 1, 1, 1),
    }
    tensors.update(_conv3(f"{name}.residual.2", out, channels, 3))
    tensors.update(_conv3(f"{name}.residual.6", out, out, 3))
    if channels != out:
        tensors.update(_conv3(f"{name}.shortcut", out, channels, 1))
    return tensors


def _resample(name: str, channels: int, spatial_out: int, time_out: int) -> dict[str, Shape]:
    tensors: dict[str, Shape] = {
        f"{name}.resample.1.weight": (spatial_out, channels, 3, 3),
        f"{name}.resample.1.bias": (spatial_out,),
    }
    if time_out:
        tensors[f"{name}.time_conv.weight"] = (time_out, channels, 3, 1, 1)
        tensors[f"{name}.time_conv.bias"] = (time_out,)
    return tensors


def _conv3(name: str, out: int, channels: int, kernel: int) -> dict[str, Shape]:
    return {f"{name}.weight": (out, channels, kernel, kernel, kernel), f"{name}.bias": (out,)}


def _linear(name: str, out: int, channels: int) -> dict[str, Shape]:
    return {f"{name}.weight": (out, channels), f"{name}.bias": (out,)}


def _norm(name: str, dim: int) -> dict[str, Shape]:
    return {f"{name}.weight": (dim,), f"{name}.bias": (dim,)}


def heads_of(dim: int) -> int:
    """Attention heads of a transformer of this width; every Wan model has heads of 128.

    Returns:
        0 when the width is not a positive multiple of 128.
    """
    return 0 if dim % _HEAD_DIM else dim // _HEAD_DIM


def first_dim(shapes: Mapping[str, Shape], name: str, axis: int) -> int | None:
    """One dimension of a tensor; None when the tensor or the axis is not there."""
    shape = shapes.get(name)
    return None if shape is None or axis >= len(shape) or axis < -len(shape) else shape[axis]
