"""A tiny sentencepiece model like UMT5's, trained on the spot, and its parts for the other tokenizer formats."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import sentencepiece
import tokenizers

_SUBJECTS = ("a cat", "the old dog", "a small boat", "one red kite", "一只猫", "小船", "红色的风筝", "一位女孩")
_VERBS = ("walks slowly", "is turning", "floats gently", "runs", "走在", "慢慢地转动", "飘在", "跑过")
_PLACES = ("on the grass", "over a calm sea", "in the city at night", "草地上", "平静的海面上", "夜晚的城市里")


def train_tokenizer(max_pieces: int) -> bytes:
    """A serialised sentencepiece model with at most `max_pieces` pieces (256 of them are bytes)."""
    sentences = (f"{s} {v} {p}." for s in _SUBJECTS for v in _VERBS for p in _PLACES)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences,
        model_writer=model,
        model_type="unigram",
        vocab_size=max_pieces,
        hard_vocab_limit=False,
        byte_fallback=True,
        normalization_rule_name="nmt_nfkc",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        num_threads=1,
        minloglevel=4,
    )
    return model.getvalue()


def pieces(spiece: bytes) -> list[tuple[str, float, int]]:
    """(piece, score, sentencepiece type) by id."""
    model: Any = sentencepiece.SentencePieceProcessor(model_proto=spiece)

    def kind(i: int) -> int:
        return 2 if model.is_unknown(i) else 3 if model.is_control(i) else 6 if model.is_byte(i) else 1

    return [(model.id_to_piece(i), model.get_score(i), kind(i)) for i in range(model.vocab_size())]


def charsmap(spiece: bytes) -> bytes:
    """`normalizer_spec.precompiled_charsmap` of a serialised model (fields 3 and 2)."""
    normaliser = next(value for field, value in _length_fields(spiece) if field == 3)
    return next(value for field, value in _length_fields(normaliser) if field == 2)


def _length_fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """The length-delimited fields of a protobuf message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 2:
            size = varint()
            yield tag >> 3, message[at : at + size]
            at += size
        elif tag & 7 == 5:
            at += 4
        else:
            varint()


def tokenizer_json(spiece: bytes) -> Any:
    """The same tokenizer for the tokenizers library, as transformers converts T5."""
    vocabulary = [(piece, score) for piece, score, _ in pieces(spiece)]
    tokenizer: Any = tokenizers.Tokenizer(tokenizers.models.Unigram(vocabulary, unk_id=2, byte_fallback=True))
    tokenizer.normalizer = tokenizers.normalizers.Sequence(
        [
            tokenizers.normalizers.Precompiled(charsmap(spiece)),
            tokenizers.normalizers.Strip(left=False, right=True),
            tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), "▁"),
        ]
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.add_special_tokens(["<pad>", "</s>", "<unk>"])
    tokenizer.enable_padding(length=8, pad_id=0, pad_token="<pad>")  # noqa: S106 - as a published file may have it
    return tokenizer
