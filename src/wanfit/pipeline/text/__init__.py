"""Text: tokenizer, prompt and UMT5 encoder."""

from .encode import encode_prompts
from .encoder import Placement, TextEncoder, load_text_encoder
from .prompt import MAX_TOKENS, clean_prompt, prompt_ids
from .tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "MAX_TOKENS",
    "Placement",
    "TextEncoder",
    "Tokenizer",
    "clean_prompt",
    "encode_prompts",
    "load_text_encoder",
    "load_tokenizer",
    "prompt_ids",
]
