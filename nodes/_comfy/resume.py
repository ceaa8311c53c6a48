"""Model outputs kept on disk while a sampler runs, so that the same run can go on after a crash or a cancel.

What is kept is what the model answered in each step, guidance included. A resumed run lets the sampler start from
the beginning and answers from the record until it is used up: whatever a sampler remembers of earlier steps, and
whatever noise it draws from the seed, is then the same as in the undisturbed run.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import comfy.patcher_extension
import folder_paths
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ...src.wanfit.errors import CheckpointError, InputError, OutputError
from .patcher import EnginePatcher

_KEY = "wanfit_resume"
_SAMPLE = 64
"""Numbers of each LoRA tensor that go into the fingerprint."""


def open_answers(node_id: str, every: int, resume: bool) -> Answers | None:
    """The record of one sampler node; None when nothing is to be kept or resumed."""
    if not every and not resume:
        return None
    name = "".join(letter if letter.isalnum() else "_" for letter in node_id)
    return Answers(Path(folder_paths.get_output_directory()) / "wanfit_checkpoints" / name, every, resume)


def advice(model: Any) -> str:
    """What a person whose run was broken off can do, by whether its MODEL is recorded."""
    kind = comfy.patcher_extension.WrappersMP.PREDICT_NOISE
    if model.wrappers.get(kind, {}).get(_KEY):
        return "What was sampled is kept: queue the same graph again with <resume> on"
    return (
        "This sampler kept nothing: WanFitSampler with save_every keeps each step, and goes on from there with resume"
    )


class Answers:
    """The model's answers in one run, in one folder; a new run takes the place of the one before.

    Args:
        every: answers between two files; 0 keeps nothing new.
        resume: answer from the folder's files first.
    """

    def __init__(self, folder: Path, every: int, resume: bool) -> None:
        self._folder, self._every, self._resume = folder, every, resume
        self._facts: dict[str, str] = {}
        self._known: list[tuple[str, torch.Tensor]] = []
        self._pending: list[tuple[str, torch.Tensor]] = []
        self._saved = self._count = 0

    def begin(
        self,
        model_high: Any,
        model_low: Any | None,
        positive: Any,
        negative: Any,
        latent: Mapping[str, Any],
        settings: Any,
        switch: int,
    ) -> str:
        """Read or remove what an earlier run left; returns what a person should know.

        Raises:
            InputError: resume_mismatch, naming what differs. CheckpointError: file_damaged. OutputError.
        """
        self._facts = {
            **{name: str(value) for name, value in dataclasses.asdict(settings).items()},
            "switch": str(switch),
            "model_high": _fingerprint_of_model(model_high),
            "model_low": "none" if model_low is None else _fingerprint_of_model(model_low),
            "positive": _fingerprint(positive),
            "negative": _fingerprint(negative),
            "latent_image": _fingerprint(latent),
        }
        if not self._resume:
            self._remove()
            return ""
        self._read()
        self._saved = len(self._known)
        if not self._saved:
            return "\nnothing to resume"
        text = f"\nresumed: {self._saved} model outputs from {self._folder}"
        if any(_cache_of(model).startswith("EasyCache") for model in (model_high, model_low)):
            text += (
                "\nnote: EasyCache remembers steps inside the model and begins anew here: the result is close to that "
                "of the undisturbed run, not equal"
            )
        return text

    def over(self, model: Any) -> Any:
        """A clone of the MODEL whose answers are recorded, or come from the record."""
        clone = model.clone()
        kind = comfy.patcher_extension.WrappersMP.PREDICT_NOISE
        clone.add_wrapper_with_key(kind, _KEY, self._answer)
        return clone

    def __enter__(self) -> Answers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """A complete run needs its record no more; one that is broken off keeps all of it."""
        if error is None:
            self._remove()
        else:
            self._write()

    def _remove(self) -> None:
        try:
            if self._folder.is_dir():
                shutil.rmtree(self._folder)
        except OSError as error:
            raise OutputError(
                "output_unwritable",
                "save",
                f"the old checkpoints in {self._folder} cannot be deleted: {error.strerror or error}",
                "Delete the folder, or set <save_every> to 0",
            ) from error

    def _answer(
        self, executor: Callable[..., torch.Tensor], x: torch.Tensor, timestep: torch.Tensor, *rest: Any
    ) -> torch.Tensor:
        number = self._count
        self._count += 1
        asked = _hash([x, timestep])
        if number < len(self._known):
            expected, answer = self._known[number]
            if asked != expected:
                raise self._mismatch(f"the latents of model call {number + 1}")
            return answer.to(x.device)
        answer = executor(x, timestep, *rest)
        if self._every:
            self._pending.append((asked, answer.detach().to("cpu", copy=True)))
            if len(self._pending) >= self._every:
                self._write()
        return answer

    def _write(self) -> None:
        if not self._pending:
            return
        metadata = {
            "facts": json.dumps(self._facts),
            "asked": json.dumps([asked for asked, _ in self._pending]),
            "first": str(self._saved),
        }
        target = self._folder / f"{self._saved:05d}.safetensors"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_suffix(".part")
            save_file({"answers": torch.stack([answer for _, answer in self._pending])}, unfinished, metadata)
            unfinished.replace(target)
        except (OSError, SafetensorError) as error:  # costs no run: tried again with the next answer
            logging.warning("WanFitSampler: the checkpoint %s cannot be written: %s", target, error)
            return
        self._saved += len(self._pending)
        self._pending.clear()

    def _read(self) -> None:
        for path in sorted(self._folder.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    metadata = file.metadata() or {}
                    answers = file.get_tensor("answers")
            except (SafetensorError, OSError) as error:
                raise self._damaged(path, str(error)) from error
            if not {"facts", "asked", "first"} <= metadata.keys() or metadata["first"] != str(len(self._known)):
                raise self._damaged(path, "it does not follow the file before it")
            self._compare(json.loads(metadata["facts"]))
            self._known += zip(json.loads(metadata["asked"]), answers, strict=True)

    def _compare(self, facts: Mapping[str, str]) -> None:
        different = [name for name in self._facts if facts.get(name) != self._facts[name]]
        if different:
            raise self._mismatch(", ".join(f"{n} was {facts.get(n)} and is {self._facts[n]}" for n in different))

    def _mismatch(self, what: str) -> InputError:
        return InputError(
            "resume_mismatch",
            "load",
            f"the checkpoints in {self._folder} are of another run: {what}",
            "Set everything as it was, or switch <resume> off to begin anew",
        )

    def _damaged(self, path: Path, what: str) -> CheckpointError:
        return CheckpointError(
            "file_damaged", "load", f"the checkpoint {path} cannot be read: {what}", "Switch <resume> off to begin anew"
        )


def _fingerprint_of_model(model: Any) -> str:
    name = type(model.model).__name__
    if isinstance(model, EnginePatcher):
        checkpoint = model.runtime.checkpoint
        name = f"{checkpoint.path.name} ({checkpoint.nbytes} bytes)"
    digest = hashlib.sha256()
    for key in sorted(model.patches):
        for strength, patch, *rest in model.patches[key]:
            digest.update(f"{key} {strength} {rest[:1]} {type(patch).__name__}".encode())
            for tensor in _tensors(getattr(patch, "weights", patch)):
                digest.update(_bytes(tensor.flatten()[:_SAMPLE]))
    name += f", patches {digest.hexdigest()[:12]}" if model.patches else ""
    cache = _cache_of(model)
    return f"{name}, {cache}" if cache else name


def _cache_of(model: Any | None) -> str:
    """Core's EasyCache or LazyCache on a MODEL and its settings, or nothing."""
    options = {} if model is None else model.model_options.get("transformer_options", {})
    cache = options.get("easycache")
    if cache is None:
        return ""
    return f"{cache.name} {cache.reuse_threshold:g} {cache.start_percent:g} {cache.end_percent:g}"


def _fingerprint(value: Any) -> str:
    return _hash(_tensors(value))[:12]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """All tensors inside lists and dictionaries, in a fixed order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _hash(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(str(tuple(tensor.shape)).encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().to("cpu").reshape(-1).clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8).numpy().tobytes()
