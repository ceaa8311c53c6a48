"""WanFitTextEncoderLoader: UMT5-XXL as ComfyUI's CLIP, from safetensors or GGUF."""

from __future__ import annotations

from typing import Any

from comfy_api.v0_0_2 import io

NAMES = {"text_encoder": "text_encoder"}


class WanFitTextEncoderLoader(io.ComfyNode):
    """A GGUF encoder stays quantised in memory."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ._comfy import folders

        return io.Schema(
            node_id="WanFitTextEncoderLoader",
            display_name="WanFit Load Text Encoder",
            category="WanFit",
            description="Loads the UMT5-XXL text encoder of Wan as a CLIP for ComfyUI's own text nodes.",
            inputs=[
                io.Combo.Input(
                    "text_encoder",
                    options=folders.files("text_encoders"),
                    tooltip="A umt5_xxl file in models/text_encoders, safetensors or GGUF. fp8 takes about 6.3 GiB, "
                    "Q4 about 3.5 GiB, fp16 about 10.6 GiB.",
                ),
                io.Combo.Input(
                    "device",
                    options=["default", "cpu"],
                    default="default",
                    tooltip="default: ComfyUI decides. cpu: keep it out of VRAM; a prompt takes some seconds more.",
                ),
            ],
            outputs=[io.Clip.Output("CLIP", display_name="clip", tooltip="For CLIPTextEncode.")],
        )

    @classmethod
    def validate_inputs(cls, text_encoder: str, device: str) -> bool | str:
        from ._comfy import checks

        return checks.files_present("text_encoders", NAMES, text_encoder=text_encoder)

    @classmethod
    def fingerprint_inputs(cls, text_encoder: str, device: str) -> Any:
        from ._comfy import folders

        return folders.fingerprint("text_encoders", text_encoder)

    @classmethod
    def execute(cls, text_encoder: str, device: str) -> io.NodeOutput:
        from ._comfy import clip, errors

        with errors.in_words_of(NAMES, "load"):
            return io.NodeOutput(clip.load(text_encoder, device))
