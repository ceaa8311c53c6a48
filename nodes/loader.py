"""WanFitLoader: one or both experts of a Wan model, from safetensors or GGUF."""

from __future__ import annotations

from typing import Any

from comfy_api.v0_0_2 import io

NAMES = {"transformer": "model_high", "transformer_2": "model_low"}


class WanFitLoader(io.ComfyNode):
    """Both experts checked against each other before any weight is read."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ._comfy import folders

        files = folders.files("diffusion_models")
        return io.Schema(
            node_id="WanFitLoader",
            display_name="WanFit Load Wan Model",
            category="WanFit",
            description="Loads Wan 2.2 (or 2.1) transformers whose blocks WanFit streams within the memory you have. "
            "Takes bf16, fp16, fp8 (plain or scaled) and GGUF files. Only headers are read until you sample.",
            inputs=[
                io.Combo.Input(
                    "model_high",
                    options=files,
                    tooltip="The high-noise expert, or the only model (TI2V-5B, Wan 2.1). A file in "
                    "models/diffusion_models. GGUF Q4 to Q8 and fp8 need less RAM and transfer than bf16; Q4 is "
                    "smallest and least exact.",
                ),
                io.Combo.Input(
                    "model_low",
                    options=[folders.NONE, *files],
                    default=folders.NONE,
                    tooltip="The low-noise expert of the same model, or none for a model without experts.",
                ),
                io.Combo.Input(
                    "weight_dtype",
                    options=["as stored", "fp8_e4m3fn"],
                    default="as stored",
                    tooltip="as stored: the file's own format. fp8_e4m3fn: quantise the blocks' matrices of a 16-bit "
                    "file while they are loaded: half the memory and transfer, slightly less exact, kept in RAM.",
                ),
            ],
            outputs=[
                io.Model.Output("MODEL_HIGH", display_name="model_high", tooltip="MODEL for ComfyUI's own samplers."),
                io.Model.Output(
                    "MODEL_LOW",
                    display_name="model_low",
                    tooltip="The low-noise MODEL; for none, an error where it is used.",
                ),
                io.String.Output("INFO", display_name="info", tooltip="What the files hold, in one line each."),
            ],
        )

    @classmethod
    def validate_inputs(cls, model_high: str, model_low: str, weight_dtype: str) -> bool | str:
        from ._comfy import checks

        return checks.files_present("diffusion_models", NAMES, transformer=model_high, transformer_2=model_low)

    @classmethod
    def fingerprint_inputs(cls, model_high: str, model_low: str, weight_dtype: str) -> Any:
        from ._comfy import folders

        return folders.fingerprint("diffusion_models", model_high, model_low)

    @classmethod
    def execute(cls, model_high: str, model_low: str, weight_dtype: str) -> io.NodeOutput:
        from ._comfy import errors, load

        with errors.in_words_of(NAMES, "load"):
            return io.NodeOutput(*load.experts(model_high, model_low, weight_dtype))
