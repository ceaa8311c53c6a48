"""The memory-lean forward of Wan's transformer blocks."""

from .adapter import LowRank
from .attention import ATTENTION_BACKENDS, AttentionBackend, sdpa
from .attention_choice import choose_attention
from .footprint import activation_bytes, chunk_bytes
from .forward import block_forward
from .lean_block import LeanBlock, WeightSource
from .modulation import TokenModulation
from .patches import BlockPatches, PatchedWeights
from .settings import BlockShape, ForwardSettings

__all__ = [
    "ATTENTION_BACKENDS",
    "AttentionBackend",
    "BlockPatches",
    "BlockShape",
    "ForwardSettings",
    "LeanBlock",
    "LowRank",
    "PatchedWeights",
    "TokenModulation",
    "WeightSource",
    "activation_bytes",
    "block_forward",
    "choose_attention",
    "chunk_bytes",
    "sdpa",
]
