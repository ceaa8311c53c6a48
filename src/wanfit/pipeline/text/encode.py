"""Prompts to the text context of a Wan transformer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .encoder import TextEncoder
from .prompt import MAX_TOKENS, prompt_ids
from .tokenizer import PAD_ID, Tokenizer, check_vocabulary


def encode_prompts(
    encoder: TextEncoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    max_length: int = MAX_TOKENS,
    *,
    names: Sequence[str] = (),
) -> torch.Tensor:
    """The prompts' embeddings, in one pass over the weights.

    The encoder runs on the longest prompt's length, not on `max_length`: padding is masked out of the attention, so
    it cannot change the embeddings of real ids, and what it yields itself is set to zero.

    Args:
        prompts: uncleaned text.
        max_length: length of the result; shorter prompts are zero beyond their end, longer ones are refused.
        names: the inputs' names, one for each prompt; all `prompt` when left out. Only a `negative_prompt` may be
            empty.

    Returns: (B, max_length, dim), `encoder.compute_dtype`, on `encoder.device`.
    Raises: InputError: `prompt_invalid`; `pair_mismatch` when tokenizer and encoder do not belong together.
    Source: diffusers `pipelines/wan/pipeline_wan.py` (`_get_t5_prompt_embeds`), Apache-2.0.
    """
    check_vocabulary(tokenizer, encoder.vocab_rows)
    names = names or ["prompt"] * len(prompts)
    sequences = [
        prompt_ids(tokenizer, prompt, name=name, max_length=max_length)
        for prompt, name in zip(prompts, names, strict=True)
    ]
    longest = max(len(ids) for ids in sequences)
    ids = torch.full((len(sequences), longest), PAD_ID, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
        mask[row, : len(sequence)] = 1
    hidden = encoder.forward(ids, mask)
    embeddings = hidden.new_zeros(len(sequences), max_length, encoder.dim)
    for row, sequence in enumerate(sequences):
        embeddings[row, : len(sequence)] = hidden[row, : len(sequence)]
    return embeddings
