"""Where a block's weights live and how they get to the device."""

from .mapped import MappedBlocks

__all__ = ["MappedBlocks"]
