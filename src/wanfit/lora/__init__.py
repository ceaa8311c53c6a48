"""LoRA files: names, kinds, and which tensors of a model they change."""

from .match import Match, match
from .reader import Difference, LoraFile, LowRankPair, open_lora

__all__ = ["Difference", "LoraFile", "LowRankPair", "Match", "match", "open_lora"]
