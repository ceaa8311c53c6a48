"""The memory-lean forward of Wan's transformer blocks."""

from .attention import ATTENTION_BACKENDS, AttentionBackend, sdpa
from .forward import block_forward
from .lean_block import LeanBlock, WeightSource
from .modulation import TokenModulation
from .settings import BlockShape, ForwardSettings

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "BlockShape",
    "ForwardSettings",
    "LeanBlock",
    "TokenModulation",
    "WeightSource",
    "block_forward",
    "sdpa",
]
