"""Ids from every carrier of the tokenizer against sentencepiece's own."""

import json
import shutil

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file, save_file

from wanfit.checkpoint import open_checkpoint
from wanfit.errors import CheckpointError, InputError
from wanfit.pipeline.text import load_tokenizer
from wanfit.pipeline.text.spm import model_from_gguf
from wanfit.tiny import text as tiny

TEXTS = {
    "ascii": "a cat walks slowly on the grass, 24 fps",
    "chinese": "一只猫走在草地上，夜晚的城市里。",
    "full-width": "ＦＵＬＬ ｗｉｄｔｈ １２３！",
    "ligature": "eﬃcient ﬁsh ﬂoats",
    "emoji": "a red kite 🪁 and a family 👩‍👩‍👧",
    "unseen script": "日本語テキスト и кириллица",
    "empty": "",
}
COMPATIBILITY_FORMS = ("full-width", "ligature")


def reference_ids(tiny_text, text):
    return [*sentencepiece.SentencePieceProcessor(model_proto=tiny_text.spiece).encode(text), 1]


@pytest.mark.parametrize("layout", ["comfy-fp16", "comfy-fp8-scaled", "gguf-q8_0", "diffusers"])
@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_ids_are_those_of_sentencepiece(layouts, tiny_text, layout, text):
    with open_checkpoint(layouts[layout]) as checkpoint:
        assert load_tokenizer(checkpoint).encode(text) == reference_ids(tiny_text, text)


def test_the_texts_exercise_the_byte_fallback_and_the_charsmap(tiny_text):
    """Otherwise the comparison above would prove little."""
    processor = sentencepiece.SentencePieceProcessor(model_proto=tiny_text.spiece)
    assert any(processor.is_byte(i) for i in processor.encode(TEXTS["emoji"]))
    assert processor.encode(TEXTS["full-width"]) == processor.encode("FULL width 123!")
    assert (processor.pad_id(), processor.eos_id(), processor.unk_id()) == (0, 1, 2)


def test_gguf_without_charsmap_reads_compatibility_forms_differently(tiny_text, tmp_path):
    path = tiny.write_gguf(tiny_text, tmp_path, with_charsmap=False)
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    for name, text in TEXTS.items():
        same = tokenizer.encode(text) == reference_ids(tiny_text, text)
        assert same == (name not in COMPATIBILITY_FORMS and name != "chinese"), name


def test_gguf_charsmap_may_be_signed_bytes(tiny_text, layouts):
    with open_checkpoint(layouts["gguf-q8_0"]) as checkpoint:
        metadata = dict(checkpoint.metadata)
    raw = bytes(int(b) & 0xFF for b in metadata["tokenizer.ggml.precompiled_charsmap"])
    signed = [b - 256 if b > 127 else b for b in raw]
    changed = {**metadata, "tokenizer.ggml.precompiled_charsmap": signed}
    assert model_from_gguf(changed, "x.gguf") == model_from_gguf(metadata, "x.gguf")


def test_gguf_padding_tokens_are_not_ids(layouts, tiny_text):
    with open_checkpoint(layouts["gguf-q8_0"]) as checkpoint:
        assert len(list(checkpoint.metadata["tokenizer.ggml.tokens"])) == tiny_text.shape.vocab_rows
        pieces = sentencepiece.SentencePieceProcessor(model_proto=tiny_text.spiece).vocab_size()
        assert load_tokenizer(checkpoint).vocab_size == pieces < tiny_text.shape.vocab_rows


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokenizer.ggml.model": "llama"}, "file_unsupported"),
        ({"tokenizer.ggml.scores": [0.0]}, "file_damaged"),
    ],
)
def test_gguf_with_another_or_a_damaged_tokenizer(layouts, change, code):
    with open_checkpoint(layouts["gguf-q8_0"]) as checkpoint:
        metadata = {**checkpoint.metadata, **change}
    with pytest.raises(CheckpointError) as caught:
        model_from_gguf(metadata, "x.gguf")
    assert caught.value.code == code


def test_kijai_file_has_no_tokenizer(layouts):
    with open_checkpoint(layouts["kijai-bf16"]) as checkpoint, pytest.raises(CheckpointError) as caught:
        load_tokenizer(checkpoint)
    assert caught.value.code == "tokenizer_missing"
    assert "umt5-xxl-enc-bf16.safetensors" in caught.value.what
    assert "spiece.model" in caught.value.change


@pytest.mark.parametrize("place", [".", "tokenizer"])
@pytest.mark.parametrize("name", ["spiece.model", "tokenizer.json"])
def test_tokenizer_beside_the_file(layouts, tiny_text, tmp_path, place, name):
    file = shutil.copy(layouts["kijai-bf16"], tmp_path)
    (tmp_path / place).mkdir(exist_ok=True)
    shutil.copy(layouts["diffusers"].parent / "tokenizer" / name, tmp_path / place)
    with open_checkpoint(file) as checkpoint:
        assert load_tokenizer(checkpoint).encode(TEXTS["ascii"]) == reference_ids(tiny_text, TEXTS["ascii"])


@pytest.mark.parametrize("where", ["", "tokenizer", "tokenizer/spiece.model", "tokenizer/tokenizer.json"])
def test_tokenizer_from_a_given_path(layouts, tiny_text, where):
    tokenizer = load_tokenizer(layouts["diffusers"].parent / where)
    assert tokenizer.encode(TEXTS["chinese"]) == reference_ids(tiny_text, TEXTS["chinese"])


def test_given_path_without_a_tokenizer(tmp_path):
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path / "nowhere")
    assert caught.value.code == "file_missing"
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.code == "tokenizer_missing"


@pytest.mark.parametrize(
    ("name", "content"), [("spiece.model", b"not a model"), ("tokenizer.json", b"{}"), ("spiece.model", b"")]
)
def test_damaged_tokenizer_files(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        load_tokenizer(tmp_path)
    assert caught.value.code == "file_damaged"


def test_tokenizer_with_other_special_ids_is_refused(layouts, tmp_path):
    document = json.loads((layouts["diffusers"].parent / "tokenizer" / "tokenizer.json").read_text("utf-8"))
    document["model"]["vocab"][1][0] = "</t>"
    document["added_tokens"] = []
    document["post_processor"] = None
    (tmp_path / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    with pytest.raises(CheckpointError, match="special ids"):
        load_tokenizer(tmp_path)


def test_tokenizer_of_another_model_is_refused(layouts, tmp_path):
    """A T5 tokenizer has UMT5's special ids too; only its size gives it away."""
    tensors = load_file(layouts["comfy-fp16"])
    tensors["shared.weight"] = torch.zeros(4000, tensors["shared.weight"].shape[1], dtype=torch.float16)
    path = tmp_path / "umt5_xxl_fp16.safetensors"
    save_file(tensors, path)
    with open_checkpoint(path) as checkpoint, pytest.raises(InputError, match="4000 rows") as caught:
        load_tokenizer(checkpoint)
    assert caught.value.code == "pair_mismatch"


def test_tiny_files_are_deterministic_and_silent(tiny_text, layouts, tmp_path, capfd):
    again = tiny.make_text()
    assert again.spiece == tiny_text.spiece
    other = tiny.write_gguf(again, tmp_path)
    assert other.read_bytes() == layouts["gguf-q8_0"].read_bytes()
    assert not torch.equal(tiny.make_text(seed=1).weights["shared.weight"], again.weights["shared.weight"])
    assert capfd.readouterr() == ("", "")
