"""Write a sentencepiece model from GGUF tokenizer metadata, without protobuf.

Only five kinds of field occur (varint, bool, float, bytes, message), so the wire format is written by hand.
Source: sentencepiece src/sentencepiece_model.proto (field numbers), Apache-2.0.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ...errors import CheckpointError

_UNIGRAM = 1
_UNUSED = 5
_BYTE = 6
_VARINT, _LENGTH, _FIXED32 = 0, 2, 5


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | _FIXED32) + struct.pack("<f", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _LENGTH) + _varint(len(value)) + value


def encode_model(
    pieces: Iterable[tuple[bytes, float, int]],
    *,
    charsmap: bytes,
    add_dummy_prefix: bool,
    remove_extra_whitespaces: bool,
) -> bytes:
    """A serialised unigram `ModelProto`.

    Args:
        pieces: (piece, score, type), in the order of the ids; types as in sentencepiece: 1 normal, 2 unknown,
            3 control, 4 user defined, 5 unused, 6 byte.
        charsmap: the normaliser's `precompiled_charsmap`; empty for none.
        add_dummy_prefix: put a space before the text.
        remove_extra_whitespaces: collapse runs of spaces.
    """
    body: list[bytes] = []
    has_bytes = False
    for piece, score, kind in pieces:
        has_bytes |= kind == _BYTE
        body.append(_bytes(1, _bytes(1, piece) + _float(2, score) + _number(3, kind)))
    trainer = _number(3, _UNIGRAM) + _number(4, len(body)) + _number(35, has_bytes)
    normaliser = (
        (_bytes(2, charsmap) if charsmap else b"") + _number(3, add_dummy_prefix) + _number(4, remove_extra_whitespaces)
    )
    return b"".join(body) + _bytes(2, trainer) + _bytes(3, normaliser)


def model_from_gguf(metadata: Mapping[str, object], file: str) -> bytes:
    """The serialised sentencepiece model that the KV pairs `tokenizer.ggml.*` of a UMT5 GGUF describe.

    The charsmap is honoured: without it full-width letters, ligatures and other compatibility forms get other ids
    than the model was trained with. Unused pieces at the end, which converters append to fill the embedding, are
    left out.

    Args:
        metadata: the KV pairs of the file; must hold `tokenizer.ggml.tokens`.
        file: name of the file, for messages.

    Raises:
        CheckpointError: `file_unsupported` for another kind of tokenizer, `file_damaged` for lists of unequal length.
    """
    prefix = "tokenizer.ggml."
    kind = str(metadata.get(prefix + "model"))
    if kind != "t5":
        raise CheckpointError(
            "file_unsupported",
            "text",
            f"{file} carries a tokenizer of kind {kind!r}; the UMT5 encoder needs kind 't5' (sentencepiece unigram)",
            "Use a GGUF file converted from google/umt5-xxl, or give <tokenizer> the path of its spiece.model",
        )
    tokens, scores, types = (_list(metadata, prefix + key) for key in ("tokens", "scores", "token_type"))
    if not len(tokens) == len(scores) == len(types):
        raise CheckpointError(
            "file_damaged",
            "text",
            f"the tokenizer of {file} has {len(tokens)} tokens, {len(scores)} scores and {len(types)} token types",
            "Download or convert the file again, or give <tokenizer> the path of a spiece.model",
        )
    count = len(tokens)
    while count and int(types[count - 1]) == _UNUSED:
        count -= 1
    return encode_model(
        (
            (
                token if isinstance(token, bytes) else str(token).encode("utf-8", "surrogateescape"),
                float(score),
                int(kind),
            )
            for token, score, kind in zip(tokens[:count], scores[:count], types[:count], strict=True)
        ),
        charsmap=_raw_bytes(metadata.get(prefix + "precompiled_charsmap")),
        add_dummy_prefix=bool(metadata.get(prefix + "add_space_prefix", True)),
        remove_extra_whitespaces=bool(metadata.get(prefix + "remove_extra_whitespaces", True)),
    )


def _list(metadata: Mapping[str, object], key: str) -> list[Any]:
    value: Any = metadata.get(key, ())
    return list(value)


def _raw_bytes(value: Any) -> bytes:
    """Bytes of an array that the writer stored as uint8 or int8."""
    if value is None:
        return b""
    if isinstance(value, bytes):
        return value
    return (np.asarray(value, dtype=np.int64) & 0xFF).astype(np.uint8).tobytes()
