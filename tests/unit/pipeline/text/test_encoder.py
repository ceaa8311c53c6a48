"""The encoder over stored weights against transformers' own UMT5 on the same weights.

The reference weights are read by other code: safetensors and gguf-py, not WanFit's reader and dequantisers.
Tolerance in float32: 1e-5 of the largest value. Both sides compute the same products in float32; only the order of
sums differs (another sequence length, a dequantised weight that is not contiguous).
"""

import gc
import re
import weakref

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import UMT5Config, UMT5EncoderModel

from wanfit.checkpoint import open_checkpoint
from wanfit.errors import CheckpointError, InputError
from wanfit.pipeline.text import clean_prompt, encode_prompts, load_text_encoder, load_tokenizer
from wanfit.quant import QuantEmbedding, QuantLinear
from wanfit.tiny import text as tiny

LAYOUTS = (
    "comfy-fp16",
    "comfy-bf16",
    "comfy-fp8-scaled",
    "kijai-bf16",
    "kijai-fp8",
    "diffusers",
    "gguf-q8_0",
    "gguf-q5_1",
)
PROMPTS = ["a cat walks slowly on the grass, then it floats gently over a calm sea.", "一只猫"]


def stored_weights(path, names):
    """float32 weights by Hugging Face name, as the file holds them."""
    if path.suffix == ".gguf":
        tensors = {t.name: t for t in gguf.GGUFReader(path).tensors}
        found = {name: tensors[tiny.gguf_name(name)] for name in names}
        return {
            name: torch.from_numpy(gguf.dequantize(t.data, t.tensor_type).astype("float32"))
            for name, t in found.items()
        }
    tensors = load_file(path / "model.safetensors" if path.is_dir() else path)
    weights = {}
    for name in names:
        stored = tensors[tiny.wan_name(name)] if "umt5-xxl-enc" in path.name else tensors[name]
        scale = tensors.get(name.removesuffix("weight") + "scale_weight", torch.tensor(1.0))
        weights[name] = stored.float() * scale
    return weights


def reference_model(path, tiny_text, tmp_path):
    """transformers' model of what the file at `path` holds, loaded by transformers."""
    if path.is_dir():
        return UMT5EncoderModel.from_pretrained(path, dtype=torch.float32)
    weights = stored_weights(path, tiny_text.weights)
    folder = tiny.write_diffusers(tiny.TinyText(tiny_text.shape, weights, tiny_text.spiece), tmp_path)
    return UMT5EncoderModel.from_pretrained(folder, dtype=torch.float32)


@torch.no_grad()
def reference_embeddings(model, tokenizer, prompts):
    """diffusers' `_get_t5_prompt_embeds`: run at 512, zero what is beyond the end."""
    ids, mask = torch.zeros(2, len(prompts), 512, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        sequence = torch.tensor(tokenizer.encode(clean_prompt(prompt)))
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    return model(ids, attention_mask=mask).last_hidden_state * mask[..., None]


def relative_error(result, reference):
    return ((result.float() - reference).abs().max() / reference.abs().max()).item()


def write_changed(tiny_text, folder, change):
    """A Comfy file with some of its tensors changed or left out (None)."""
    path = tiny.write_comfy(tiny_text, folder)
    tensors = {**load_file(path), **change}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    return path


def run(path, prompts=PROMPTS, *, tokenizer=None, dtype=torch.float32, placement="cpu", names=()):
    with open_checkpoint(path) as checkpoint:
        encoder = load_text_encoder(checkpoint, device="cpu", compute_dtype=dtype, placement=placement)
        return encode_prompts(encoder, tokenizer or load_tokenizer(checkpoint), prompts, names=names)


@pytest.fixture(scope="module")
def tokenizer(layouts):
    return load_tokenizer(layouts["diffusers"].parent)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_equals_transformers(layouts, tiny_text, tokenizer, tmp_path, layout):
    model = reference_model(layouts[layout], tiny_text, tmp_path)
    reference = reference_embeddings(model, tokenizer, PROMPTS)
    result = run(layouts[layout], tokenizer=tokenizer)
    assert result.shape == (2, 512, tiny_text.shape.d_model)
    assert result.dtype == torch.float32
    assert relative_error(result, reference) <= 1e-5


def test_k_quants_with_another_type_for_the_embedding(tokenizer, tmp_path):
    """The mix of a published Q4_K_M file, at a width that K blocks fit in."""
    text = tiny.make_text(tiny.TinyShape(d_model=256, d_ff=256, d_kv=64, num_heads=4))
    path = tiny.write_gguf(text, tmp_path, "Q4_K", "Q6_K")
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.tensors["shared.weight"].format == "q6_k"
    reference = reference_embeddings(reference_model(path, text, tmp_path), tokenizer, PROMPTS)
    assert relative_error(run(path), reference) <= 1e-5


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_16_bit_compute_is_that_of_transformers(layouts, tiny_text, tokenizer, tmp_path, dtype, tolerance):
    """Tolerance: a few roundings of 2^-8 or 2^-11, of a sum over two layers."""
    reference = reference_embeddings(reference_model(layouts["comfy-fp16"], tiny_text, tmp_path), tokenizer, PROMPTS)
    result = run(layouts["comfy-fp16"], dtype=dtype)
    assert result.dtype == dtype
    assert relative_error(result, reference) <= tolerance


def test_float16_feed_forward_output_does_not_overflow(tiny_text, layouts, tmp_path):
    """The reason for float32 there: an output beyond 65504, which the final norm brings back to order 1."""
    name = "encoder.block.1.layer.1.DenseReluDense.wo.weight"
    path = write_changed(tiny_text, tmp_path, {name: (tiny_text.weights[name] * 60000).half()})
    reference = run(path)
    assert relative_error(run(path, dtype=torch.float16), reference) <= 1e-2
    with open_checkpoint(path) as checkpoint:
        encoder = load_text_encoder(checkpoint, device="cpu", compute_dtype=torch.float32)
        seen = []
        wo = encoder.module.encoder.block[1].layer[1].DenseReluDense.wo
        wo.register_forward_hook(lambda _m, _i, output: seen.append(output.abs().max().item()))
        encode_prompts(encoder, load_tokenizer(checkpoint), PROMPTS)
    assert max(seen) > 65504


@pytest.mark.parametrize("layout", ["comfy-fp8-scaled", "gguf-q8_0"])
def test_weights_stay_as_stored(layouts, tiny_text, layout):
    """Every linear and the embedding keep their packed bytes; nothing of their size is held converted."""
    with open_checkpoint(layouts[layout]) as checkpoint:
        encoder = load_text_encoder(checkpoint, device="cpu", compute_dtype=torch.float32)
        modules = list(encoder.module.modules())
        linears = [m for m in modules if isinstance(m, QuantLinear)]
        assert len(linears) == 7 * tiny_text.shape.num_layers
        assert isinstance(encoder.module.shared, QuantEmbedding)
        assert encoder.module.encoder.embed_tokens is encoder.module.shared
        assert {m.weight.format for m in linears} == {"q8_0" if "gguf" in layout else "f8_e4m3"}
        floats = sum(p.numel() for p in encoder.module.parameters() if p.dtype == torch.float32)
        assert floats == sum(
            w.numel() for n, w in tiny_text.weights.items() if "norm" in n or "relative_attention_bias" in n
        )
        assert not [n for n, p in encoder.module.named_parameters() if p.device.type == "meta"]
        assert encoder.nbytes == checkpoint.nbytes


def test_stored_bytes_are_not_copied(layouts):
    """Two encoders over one open file share its memory."""
    with open_checkpoint(layouts["comfy-fp8-scaled"]) as checkpoint:
        first, second = (load_text_encoder(checkpoint, device="cpu", compute_dtype=torch.float32) for _ in range(2))
        for one, other in zip(first.module.modules(), second.module.modules(), strict=True):
            if isinstance(one, QuantLinear | QuantEmbedding):
                assert one.weight.data.data_ptr() == other.weight.data.data_ptr()


@pytest.mark.parametrize("layout", ["comfy-fp8-scaled", "gguf-q8_0"])
def test_streaming_gives_the_same_and_keeps_nothing(layouts, layout):
    with open_checkpoint(layouts[layout]) as checkpoint:
        encoder = load_text_encoder(checkpoint, device="cpu", compute_dtype=torch.float32, placement="stream")
        tokenizer = load_tokenizer(checkpoint)
        result = encode_prompts(encoder, tokenizer, PROMPTS)
        parts = [*encoder.module.encoder.block, encoder.module.encoder.final_layer_norm]
        held = [t for part in parts for t in (*part.parameters(), *part.buffers())]
        assert held
        assert all(t.device.type == "meta" for t in held)
    assert torch.equal(result, run(layouts[layout]))


def test_each_layer_uses_its_own_relative_bias(tiny_text, layouts, tmp_path):
    name = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    plain = run(layouts["comfy-fp16"])
    for layer in (0, 1):
        folder = tmp_path / str(layer)
        folder.mkdir()
        changed = tiny_text.weights[name.format(layer)].flip(0).half().contiguous()
        path = write_changed(tiny_text, folder, {name.format(layer): changed})
        assert relative_error(run(path), plain) > 1e-2


def test_padding_changes_nothing_and_is_zero(layouts, tokenizer):
    """A prompt alone, beside a longer one, and at full length: the same embeddings (float32 rounding), zeros behind."""
    path = layouts["comfy-fp16"]
    long, short = run(path)
    alone = run(path, [PROMPTS[1]])[0]
    length = len(tokenizer.encode(PROMPTS[1]))
    assert relative_error(short, alone) <= 1e-5
    assert alone[:length].abs().amax(-1).gt(0).all()
    assert alone[length:].eq(0).all()
    assert short[length:].eq(0).all()
    assert long[len(tokenizer.encode(PROMPTS[0])) :].eq(0).all()


def test_an_empty_negative_prompt_is_the_end_of_sentence_id(layouts):
    result = run(layouts["comfy-fp16"], [PROMPTS[0], ""], names=["prompt", "negative_prompt"])
    assert result[1, 0].abs().max() > 0
    assert result[1, 1:].eq(0).all()


@pytest.mark.parametrize("prompt", ["", "猫" * 3000])
def test_prompts_that_cannot_be_encoded(layouts, prompt):
    with pytest.raises(InputError) as caught:
        run(layouts["comfy-fp16"], [PROMPTS[0], prompt])
    assert caught.value.code == "prompt_invalid"


def test_tokenizer_and_encoder_must_belong_together(layouts, tokenizer, tmp_path):
    other = tiny.make_text(tiny.TinyShape(d_model=64, vocab_rows=2000))
    with pytest.raises(InputError, match="2000 rows") as caught:
        run(tiny.write_kijai(other, tmp_path), tokenizer=tokenizer)
    assert caught.value.code == "pair_mismatch"


@pytest.mark.parametrize("placement", ["cpu", "stream"])
def test_release_frees_module_and_weights(layouts, placement):
    with open_checkpoint(layouts["gguf-q8_0"]) as checkpoint:
        encoder = load_text_encoder(checkpoint, device="cpu", compute_dtype=torch.float32, placement=placement)
        encode_prompts(encoder, load_tokenizer(checkpoint), PROMPTS)
        linear = encoder.module.encoder.block[0].layer[0].SelfAttention.q
        stored = [next(encoder.module.shared.buffers()), *linear.buffers()]
        watched = [weakref.ref(o) for o in (encoder.module, linear, *stored)]
        del linear, stored
        gc.disable()
        try:
            encoder.release()
            assert [ref() for ref in watched] == [None] * len(watched)
        finally:
            gc.enable()
        encoder.release()
        with pytest.raises(RuntimeError, match="released"):
            _ = encoder.module


@pytest.mark.parametrize(
    ("name", "tensor", "code"),
    [
        ("encoder.block.0.layer.1.DenseReluDense.wi_0.weight", None, "tensors_missing"),
        ("encoder.final_layer_norm.weight", None, "tensors_missing"),
        ("encoder.block.0.layer.3.surplus.weight", torch.ones(4), "model_unsupported"),
        ("encoder.block.1.layer.0.SelfAttention.k.weight", torch.zeros(32, 4096).half(), "tensors_mismatch"),
    ],
)
def test_tensors_missing_surplus_or_of_another_shape_are_named(tiny_text, tmp_path, name, tensor, code):
    path = write_changed(tiny_text, tmp_path, {name: tensor})
    with pytest.raises(CheckpointError, match=re.escape(name)) as caught:
        run(path)
    assert caught.value.code == code


def test_a_t5_encoder_is_not_taken_for_umt5(tiny_text, tmp_path):
    """T5 has a relative bias in its first layer only."""
    name = "encoder.block.1.layer.0.SelfAttention.relative_attention_bias.weight"
    with pytest.raises(CheckpointError, match="T5"):
        run(write_changed(tiny_text, tmp_path, {name: None}))


def test_heads_that_do_not_divide_the_channels(tiny_text, tmp_path):
    name = "encoder.block.{}.layer.0.SelfAttention.relative_attention_bias.weight"
    path = write_changed(tiny_text, tmp_path, {name.format(i): torch.zeros(32, 3).half() for i in (0, 1)})
    with pytest.raises(CheckpointError, match="64 attention channels do not divide among 3 heads") as caught:
        run(path)
    assert caught.value.code == "tensors_mismatch"


def test_the_tied_copy_of_the_embedding_is_accepted(layouts, tiny_text, tmp_path):
    shared = load_file(layouts["comfy-fp16"])["shared.weight"].clone()
    path = write_changed(tiny_text, tmp_path, {"encoder.embed_tokens.weight": shared})
    assert torch.equal(run(path), run(layouts["comfy-fp16"]))


def test_sizes_are_read_off_the_shapes(layouts):
    with open_checkpoint(layouts["gguf-q8_0"]) as checkpoint:
        encoder = load_text_encoder(checkpoint, device="cpu", compute_dtype=torch.float32)
    official = UMT5Config()
    config = encoder.module.config
    assert (config.d_model, config.d_ff, config.d_kv, config.num_heads) == (4096, 128, 32, 2)
    assert (config.num_layers, config.vocab_size) == (2, 384)
    for key in ("relative_attention_max_distance", "layer_norm_epsilon", "dense_act_fn"):
        assert getattr(config, key) == getattr(official, key)
