"""The files of one model, each opened once for a whole run and known to belong together."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import VARIANTS, Checkpoint, Identity, Variant, check_pair, check_parts, open_checkpoint
from ..errors import InputError
from .files import ModelFiles

OpenTransformers = Sequence[tuple[str, Checkpoint]]
"""(name, file) in the order in which they run: high and low, or one without a name."""


@dataclass(frozen=True)
class OpenModel:
    """See `open_model`."""

    transformers: OpenTransformers
    text_encoder: Checkpoint
    vae: Checkpoint
    tokenizer: Path | None

    @property
    def identities(self) -> list[Identity]:
        """Of the transformers, in the order in which they run."""
        return [checkpoint.identity for _, checkpoint in self.transformers]

    @property
    def variant(self) -> Variant:
        return VARIANTS[self.identities[0].variant]


@contextmanager
def open_model(files: ModelFiles) -> Generator[OpenModel]:
    """Read the headers and refuse what does not belong together; the files are closed in the end.

    Raises:
        CheckpointError: a file cannot be read. InputError: pair_mismatch, part_missing, model_unsupported.
    """
    with ExitStack() as stack:
        opened = OpenModel(
            [(name, stack.enter_context(open_checkpoint(path))) for name, path in files.transformers],
            stack.enter_context(open_checkpoint(files.text_encoder)),
            stack.enter_context(open_checkpoint(files.vae)),
            files.tokenizer,
        )
        _check(opened, files)
        yield opened


def _check(opened: OpenModel, files: ModelFiles) -> None:
    identities = opened.identities
    vae, text_encoder = opened.vae.identity, opened.text_encoder.identity
    for role, identity, kind in (("vae", vae, "vae"), ("text_encoder", text_encoder, "text_encoder")):
        if identity.kind != kind:
            raise _wrong_kind(role, identity.kind, kind)
    for role, identity in zip(("high", "low"), identities, strict=False):
        if identity.kind != "transformer":
            raise _wrong_kind(role, identity.kind, "transformer")
    high = identities[0]
    if len(identities) == 2:
        check_pair(*identities)
    elif opened.variant.has_experts:
        raise InputError(
            "part_missing",
            "load",
            f"{files.high.name} is one of the two experts of {high.variant} and <low> is not given",
            "Give <high> and <low> one file each",
        )
    if high.image_dim:
        raise InputError(
            "model_unsupported",
            "load",
            f"{high.variant} (Wan 2.1) also needs a CLIP vision encoder, which the command line does not run",
            "Use a Wan 2.2 I2V-A14B pair, or this file inside ComfyUI",
        )
    check_parts(high, vae, text_encoder)


def _wrong_kind(role: str, found: str, wanted: str) -> InputError:
    title = {"vae": "VAE", "text_encoder": "text encoder"}
    what = f"<{role}> holds a {title.get(found, found)}, not a {title.get(wanted, wanted)}"
    return InputError("pair_mismatch", "load", what, f"Give the file of the {title.get(wanted, wanted)} there")
