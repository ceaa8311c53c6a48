"""Every error that WanFit raises on purpose.

    WanFitError
    +-- InputError        a number, an image, a prompt, a combination of files that cannot work
    +-- CheckpointError   a model file that is missing, damaged, unsupported or of another model
    +-- QuantError        a stored format that cannot be computed with
    +-- TilingError       a VAE tile grid that cannot give the exact result
    +-- BudgetError       the run does not fit the memory it was given
    +-- OutputError       the result cannot be written
    +-- RunError          something else failed while running, and its cause is known

An error is a code, a stage, what happened (with numbers) and what to change. The texts name inputs in
angle brackets with the engine's own words (`<num_frames>`); a front end renders them in the words its user
sees (`--frames`, `length`) with `render`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

CODES: Mapping[str, str] = {
    # inputs
    "size_invalid": "width or height is not a positive multiple of what the model needs",
    "frames_invalid": "the number of frames is not 4n+1",
    "number_invalid": "a number is outside its range",
    "prompt_invalid": "the prompt is empty or longer than the text encoder takes",
    "image_invalid": "the image cannot be read or used",
    "image_unexpected": "an image was given to a model that takes none",
    "image_missing": "the model needs an image and none was given",
    "audio_invalid": "the sound has channels or values that cannot be encoded",
    "part_unsupported": "an object of another kind, or in a state that WanFit cannot take over, was given",
    "part_missing": "a part of the model is not given",
    "part_ambiguous": "a folder holds several files for one part of the model",
    "pair_mismatch": "the model files do not belong together",
    "lora_invalid": "a <lora> is given in a way that cannot be read or used",
    "lora_mismatch": "the LoRA is for another model",
    "lora_unsupported": "the LoRA is of a kind that WanFit does not apply",
    # checkpoints
    "file_missing": "the file or folder does not exist",
    "file_unreadable": "the file cannot be opened",
    "file_unsupported": "the file type is not supported",
    "file_damaged": "the file is truncated or its header contradicts its contents",
    "model_unknown": "the file holds no model that WanFit knows",
    "model_unsupported": "the file holds a Wan variant that WanFit does not run",
    "tensors_missing": "the file lacks tensors of the model",
    "tensors_mismatch": "tensors of the file have shapes that do not fit the model",
    "tokenizer_missing": "the text encoder file carries no tokenizer",
    # formats
    "format_unsupported": "the stored format is known and cannot be computed with",
    "format_unknown": "the stored format is not known",
    # blocks
    "tensor_mismatch": "the tensors handed to a transformer block do not fit it or each other",
    "attention_unavailable": "no memory-saving attention kernel takes the tensors on this card",
    # a host's patches
    "patch_unsupported": "another node or program asks for a change of the model that WanFit cannot make",
    # tiling, budget, output
    "tile_invalid": "the tile grid cannot give the exact result",
    "latent_invalid": "the latent does not fit the VAE",
    "budget_exceeded": "the run needs more memory than it was given",
    "output_unwritable": "the output cannot be written",
    "resume_mismatch": "the checkpoints are of another run",
    "memory_low": "memory is about to run out and the run has nothing left to give up",
    "run_failed": "the run failed for a cause outside of the input, such as memory that is full",
    "nan_in_latents": "the latents became NaN or infinite",
}

_NAME = re.compile(r"<([a-z_0-9]+)>")


def in_words(text: str, names: Mapping[str, str]) -> str:
    """A text whose inputs are in angle brackets, in the words of one front end."""
    return _NAME.sub(lambda match: names.get(match[1], match[1]), text)


class WanFitError(Exception):
    """Base of all errors raised on purpose.

    Args:
        code: a key of `CODES`.
        stage: where it happened: `input`, `inspect`, `load`, `text`, `denoise high`, `decode`, `save` ...
        what: what happened, with the numbers; inputs in angle brackets: `<num_frames> is 80`.
        change: what the user can do about it, same convention; may be empty only when nothing can be done.
    """

    def __init__(self, code: str, stage: str, what: str, change: str = "") -> None:
        if code not in CODES:
            raise LookupError(f"unregistered error code {code!r}; add it to wanfit.errors.CODES")
        self.code, self.stage, self.what, self.change = code, stage, what, change
        super().__init__(self.render({}))

    def add_change(self, text: str) -> None:
        """Something else that the user can do, known further up."""
        self.change = f"{self.change}. {text}" if self.change else text
        self.args = (self.render({}),)

    def render(self, names: Mapping[str, str]) -> str:
        """The message in the words of one front end: `names` maps `num_frames` to `--frames`, `length` ..."""
        text = f"[{self.code}] {self.what} (stage: {self.stage})."
        if self.change:
            text += f" {self.change}."
        return in_words(text, names)


class InputError(WanFitError):
    """A number, an image, a prompt or a combination of files that cannot work."""


class CheckpointError(WanFitError):
    """A model file that is missing, damaged, unsupported or of another model."""


class QuantError(WanFitError):
    """A stored format that cannot be computed with."""


class TilingError(WanFitError):
    """A VAE tile grid that cannot give the exact result, or a latent that the VAE cannot decode."""


class BudgetError(WanFitError):
    """The run does not fit the memory it was given."""


class OutputError(WanFitError):
    """The result cannot be written."""


class RunError(WanFitError):
    """Memory, a driver or another program made a run fail; says the cause instead of a traceback."""
