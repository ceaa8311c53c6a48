"""Where a block's weights live and how they get to the device."""

from .ladder import Ladder
from .layout import StoredTensors
from .mapped import MappedBlocks
from .patches import PatchStore
from .policy import Policy
from .store import BlockSource, BlockStore, OffloadReport
from .trace import Step, Trace

__all__ = [
    "BlockSource",
    "BlockStore",
    "Ladder",
    "MappedBlocks",
    "OffloadReport",
    "PatchStore",
    "Policy",
    "Step",
    "StoredTensors",
    "Trace",
]
