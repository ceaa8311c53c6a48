"""The UMT5 tokenizer, from wherever the model files carry it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import sentencepiece
import tokenizers

from ...checkpoint import Checkpoint
from ...errors import CheckpointError, InputError
from .spm import model_from_gguf

if TYPE_CHECKING:
    from sentencepiece import SentencePieceProcessor

PAD_ID, EOS_ID, UNK_ID = 0, 1, 2
_UNUSED_ROWS = 512
"""Rows that an embedding may have beyond its tokenizer: UMT5-xxl has 256,384 rows for 256,000 pieces."""


class Tokenizer(Protocol):
    """Text to UMT5 ids."""

    @property
    def vocab_size(self) -> int:
        """Number of ids, without the rows that only fill the embedding."""
        ...

    def encode(self, prompt: str) -> list[int]:
        """Ids with the end-of-sentence id at the end, without padding and without a length limit."""
        ...


class SentencePieceTokenizer:
    """A tokenizer over a serialised sentencepiece model.

    Raises:
        CheckpointError: `file_damaged` when sentencepiece refuses the bytes or the special ids are not UMT5's.
    """

    def __init__(self, model: bytes, origin: str) -> None:
        self._processor: SentencePieceProcessor = sentencepiece.SentencePieceProcessor()
        try:
            self._processor.LoadFromSerializedProto(model)
        except RuntimeError as error:
            raise _not_readable(origin, str(error)) from error
        _check_special_ids(origin, {"</s>": self._processor.eos_id(), "<unk>": self._processor.unk_id()})

    @property
    def vocab_size(self) -> int:
        return int(self._processor.vocab_size())

    def encode(self, prompt: str) -> list[int]:
        return [*(int(i) for i in self._processor.encode(prompt)), EOS_ID]


class JsonTokenizer:
    """A tokenizer over a `tokenizer.json` of the tokenizers library.

    Raises:
        CheckpointError: `file_damaged` when the file cannot be read or the special ids are not UMT5's.
    """

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises the bare Exception class
            raise _not_readable(str(path), str(error)) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        ids = {token: self._tokenizer.token_to_id(token) for token in ("</s>", "<unk>")}
        _check_special_ids(str(path), ids)

    @property
    def vocab_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, prompt: str) -> list[int]:
        ids = [int(i) for i in self._tokenizer.encode(prompt, add_special_tokens=False).ids]
        return [*ids, EOS_ID]


def load_tokenizer(source: Checkpoint | str | Path) -> Tokenizer:
    """The tokenizer of a text encoder.

    A checkpoint is searched in this order: the tensor `spiece_model` inside it, its GGUF tokenizer metadata, then
    `tokenizer.json` or `spiece.model` beside it, in `tokenizer/` beside it or, for a folder, in it. A path is a
    `tokenizer.json`, a sentencepiece model, or a folder that holds one of them, directly or in `tokenizer/`.

    Raises:
        CheckpointError: `tokenizer_missing` when there is none, `file_damaged` when it cannot be read,
            `file_unsupported` when it is of another kind.
        InputError: `pair_mismatch` when the checkpoint's embedding does not belong to it.
    """
    if isinstance(source, (str, Path)):
        return _from_path(Path(source))
    tokenizer = _from_checkpoint(source)
    embedding = source.tensors.get("shared.weight")
    if embedding is not None:
        check_vocabulary(tokenizer, embedding.shape[0])
    return tokenizer


def check_vocabulary(tokenizer: Tokenizer, rows: int) -> None:
    """Refuse a tokenizer that does not belong to an embedding of `rows` rows.

    Raises:
        InputError: `pair_mismatch`.
    """
    if not rows - _UNUSED_ROWS <= tokenizer.vocab_size <= rows:
        raise InputError(
            "pair_mismatch",
            "text",
            f"the tokenizer has {tokenizer.vocab_size} ids, the embedding of the text encoder has {rows} rows",
            "Give <tokenizer> the tokenizer.json or spiece.model of google/umt5-xxl",
        )


def _from_checkpoint(checkpoint: Checkpoint) -> Tokenizer:
    path = Path(checkpoint.path)
    if "spiece_model" in checkpoint.extras:
        model = checkpoint.load_extra("spiece_model").contiguous().numpy().tobytes()
        return SentencePieceTokenizer(model, f"the tensor spiece_model of {path.name}")
    if "tokenizer.ggml.tokens" in checkpoint.metadata:
        return SentencePieceTokenizer(model_from_gguf(checkpoint.metadata, path.name), path.name)
    folders = [path, path.parent] if path.is_dir() else [path.parent]
    for file in _candidates(folders):
        return _from_file(file)
    raise CheckpointError(
        "tokenizer_missing",
        "text",
        f"{path.name} carries no tokenizer, and there is no tokenizer.json or spiece.model beside it",
        "Use umt5_xxl_fp8_e4m3fn_scaled.safetensors, umt5_xxl_fp16.safetensors or a GGUF file, which carry theirs, "
        "or put the spiece.model of google/umt5-xxl beside the file, or give <tokenizer> its path",
    )


def _from_path(path: Path) -> Tokenizer:
    if path.is_file():
        return _from_file(path)
    if not path.is_dir():
        raise CheckpointError(
            "file_missing", "text", f"<tokenizer> is {path}, which does not exist", "Give the path of an existing file"
        )
    for file in _candidates([path]):
        return _from_file(file)
    raise CheckpointError(
        "tokenizer_missing",
        "text",
        f"the folder {path} holds no tokenizer.json and no spiece.model, nor does its folder tokenizer",
        "Give <tokenizer> the path of the tokenizer.json or spiece.model of google/umt5-xxl",
    )


def _candidates(folders: list[Path]) -> Iterator[Path]:
    for folder in folders:
        for place in (folder, folder / "tokenizer"):
            for name in ("tokenizer.json", "spiece.model"):
                if (place / name).is_file():
                    yield place / name


def _from_file(path: Path) -> Tokenizer:
    if path.suffix == ".json":
        return JsonTokenizer(path)
    return SentencePieceTokenizer(path.read_bytes(), str(path))


def _not_readable(origin: str, reason: str) -> CheckpointError:
    return CheckpointError(
        "file_damaged",
        "text",
        f"{origin} cannot be read as a tokenizer: {reason.strip() or 'no reason given'}",
        "Download the file again, or give <tokenizer> the path of the spiece.model of google/umt5-xxl",
    )


def _check_special_ids(origin: str, ids: dict[str, int | None]) -> None:
    expected = {"</s>": EOS_ID, "<unk>": UNK_ID}
    if ids != expected:
        raise _not_readable(origin, f"its special ids are {ids}, UMT5 has {expected}")
