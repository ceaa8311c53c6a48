"""WanFitOffloadPolicy: where a MODEL's blocks live while it samples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from comfy_api.v0_0_2 import io

from ._comfy.policy import MODES

ATTENTION = ("auto", "sdpa", "cudnn", "flash", "efficient", "xformers", "sageattention", "comfy_kitchen")
"""The engine's names: this module is imported before torch may be."""
NAMES = {
    "policy": "policy",
    "vram_budget": "vram_budget",
    "ram_budget": "ram_budget",
    "transformer": "model",
    "transformer_2": "model_low",
}


def advanced(widget: Any) -> Callable[..., Any]:
    """The widget hidden behind "show advanced" where the front end can; older schema classes have no word for it."""

    def make(*args: Any, **kwargs: Any) -> Any:
        made = widget(*args, **kwargs)
        made.extra_dict = {"advanced": True}
        return made

    return make


class WanFitOffloadPolicy(io.ComfyNode):
    """Changes how weights are placed, never the result; `attention` and `fp8_matmul` change its rounding."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanFitOffloadPolicy",
            display_name="WanFit Offload Policy",
            category="WanFit",
            description="Sets how much VRAM and RAM the blocks of a WanFit MODEL may take. The picture stays the same.",
            inputs=[
                io.Model.Input("model", tooltip="A MODEL from WanFit Load Wan Model, high noise or the only one."),
                io.Model.Input("model_low", optional=True, tooltip="The low-noise MODEL; gets the same policy."),
                io.Combo.Input(
                    "policy",
                    options=list(MODES),
                    default="auto",
                    tooltip="auto: as many blocks stay in VRAM as fit and as help. resident: all of them, fastest, "
                    "needs room for the whole model. stream: none, smallest VRAM, slower where the PCIe bus is slow. "
                    "native: hand the weights to ComfyUI's own memory management (no GGUF).",
                ),
                io.Float.Input(
                    "vram_budget",
                    default=0.0,
                    min=0.0,
                    max=192.0,
                    step=0.1,
                    tooltip="GiB of VRAM for weights and activations while sampling, 0 to 192. 0: what is free. Less "
                    "leaves room for other programs and costs time.",
                ),
                advanced(io.Float.Input)(
                    "ram_budget",
                    default=0.0,
                    min=0.0,
                    max=2048.0,
                    step=0.5,
                    tooltip="GiB of RAM for copies of blocks, 0 to 2048. 0: what is free. What does not fit is read "
                    "from disk again in every step.",
                ),
                advanced(io.Combo.Input)(
                    "attention",
                    options=[*ATTENTION, "comfyui"],
                    default="auto",
                    tooltip="auto: what ComfyUI's start options or another node chose, else the fastest exact one on "
                    "this card, measured once. comfyui: ComfyUI's own. sdpa, cudnn, flash, efficient: PyTorch's. "
                    "sageattention, comfy_kitchen round to 8 bits. What is not installed is refused.",
                ),
                advanced(io.Boolean.Input)(
                    "fp8_matmul",
                    default=True,
                    optional=True,
                    tooltip="Multiply fp8 weights in fp8 on cards that can (from RTX 40). Off: in 16 bit, slower and "
                    "closer to the file's values.",
                ),
            ],
            outputs=[
                io.Model.Output("MODEL", display_name="model", tooltip="The MODEL with this policy."),
                io.Model.Output("MODEL_LOW", display_name="model_low", tooltip="model_low with this policy."),
            ],
        )

    @classmethod
    def execute(
        cls,
        model: object,
        policy: str,
        vram_budget: float,
        ram_budget: float,
        attention: str,
        model_low: object | None = None,
        fp8_matmul: bool = True,
    ) -> io.NodeOutput:
        from ._comfy import errors, place

        with errors.in_words_of(NAMES):
            placed = place.with_policy(model, model_low, policy, vram_budget, ram_budget, attention, fp8_matmul)
            return io.NodeOutput(*placed)
