"""The memory-lean forward of Wan's transformer blocks."""

from .adapter import LowRank
from .attention import AttentionBackend, sdpa
from .attention_choice import ATTENTION, Choice, choose_attention
from .finite import require_finite
from .footprint import Moment, activation_bytes, chunk_bytes, moments
from .forward import block_forward, residual_dtype
from .lean_block import LeanBlock, PatchSource, WeightSource
from .modulation import TokenModulation
from .patches import BlockPatches, PatchedWeights
from .settings import BlockShape, ForwardSettings

__all__ = [
    "ATTENTION",
    "AttentionBackend",
    "BlockPatches",
    "BlockShape",
    "Choice",
    "ForwardSettings",
    "LeanBlock",
    "LowRank",
    "Moment",
    "PatchSource",
    "PatchedWeights",
    "TokenModulation",
    "WeightSource",
    "activation_bytes",
    "block_forward",
    "choose_attention",
    "chunk_bytes",
    "moments",
    "require_finite",
    "residual_dtype",
    "sdpa",
]
