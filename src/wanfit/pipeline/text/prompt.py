"""Clean a prompt and turn it into ids; refuse what the text encoder cannot take."""

from __future__ import annotations

import html
import re

import ftfy

from ...errors import InputError
from .tokenizer import Tokenizer

MAX_TOKENS = 512
"""Length of the text context that every Wan transformer was trained with, the end-of-sentence id included."""


def clean_prompt(text: str) -> str:
    """Repair mis-decoded characters, resolve HTML entities (twice) and collapse white space.

    Source: diffusers `pipelines/wan/pipeline_wan.py` (`prompt_clean`), Apache-2.0.
    """
    text = html.unescape(html.unescape(ftfy.fix_text(text)))
    return re.sub(r"\s+", " ", text).strip()


def prompt_ids(tokenizer: Tokenizer, prompt: str, *, name: str = "prompt", max_length: int = MAX_TOKENS) -> list[int]:
    """The ids of one cleaned prompt, the end-of-sentence id included. Needs no weights: call it before loading them.

    Args:
        name: the input's name, for messages. Only `negative_prompt` may be empty.

    Raises:
        InputError: `prompt_invalid` when the prompt is empty or has more than `max_length` ids. It is not cut.
    """
    text = clean_prompt(prompt)
    if not text and name != "negative_prompt":
        raise InputError("prompt_invalid", "input", f"<{name}> is empty", f"Describe the video in <{name}>")
    ids = tokenizer.encode(text)
    if len(ids) <= max_length:
        return ids
    kept = _longest_prefix(tokenizer, text, max_length)
    surplus = text[kept:]
    raise InputError(
        "prompt_invalid",
        "input",
        f"<{name}> has {len(ids)} tokens, the text encoder takes {max_length}, {len(ids) - max_length} fewer",
        f"Shorten <{name}> by {len(surplus.split())} words ({len(surplus)} characters): what fits ends with "
        f"'{text[max(0, kept - 24) : kept].strip()}'",
    )


def _longest_prefix(tokenizer: Tokenizer, text: str, max_length: int) -> int:
    """Characters of the longest beginning that fits, found by bisection."""
    fits, too_long = 0, len(text)
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if len(tokenizer.encode(text[:middle])) <= max_length:
            fits = middle
        else:
            too_long = middle
    return fits
