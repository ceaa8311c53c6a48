"""The nodes, in menu order. ComfyUI imports this once at start; torch and models come in only when a node runs."""

from __future__ import annotations

from typing import Any

from comfy_api.v0_0_2 import ComfyExtension

from .decode import WanFitVAEDecode
from .decode_to_video import WanFitDecodeToVideo
from .doctor import WanFitDoctor
from .loader import WanFitLoader
from .offload import WanFitOffloadPolicy
from .plan import WanFitPlan
from .probe import WanFitMemoryProbe
from .purge import WanFitPurge
from .sampler import WanFitSampler
from .text_encoder import WanFitTextEncoderLoader


class WanFitExtension(ComfyExtension):
    """All nodes of the pack."""

    async def get_node_list(self) -> list[Any]:
        # Not in on_load: 0.3.64 never calls it.
        from ._comfy import folders, prompt_record

        folders.register()
        prompt_record.RECORDER.register()
        return [
            WanFitLoader,
            WanFitTextEncoderLoader,
            WanFitOffloadPolicy,
            WanFitSampler,
            WanFitVAEDecode,
            WanFitDecodeToVideo,
            WanFitPlan,
            WanFitMemoryProbe,
            WanFitPurge,
            WanFitDoctor,
        ]
