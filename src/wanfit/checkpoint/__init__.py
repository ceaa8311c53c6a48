"""Model files: headers, identity, canonical names, memory-mapped stored tensors."""

from .folders import component_folders
from .identity import Identity
from .names import to_diffusers_transformer, to_diffusers_vae
from .pairing import check_pair, check_parts
from .reader import Checkpoint, TensorInfo, open_checkpoint
from .variants import TITLES, VARIANTS, Variant

__all__ = [
    "TITLES",
    "VARIANTS",
    "Checkpoint",
    "Identity",
    "TensorInfo",
    "Variant",
    "check_pair",
    "check_parts",
    "component_folders",
    "open_checkpoint",
    "to_diffusers_transformer",
    "to_diffusers_vae",
]
