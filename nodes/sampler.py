"""WanFitSampler: both experts of Wan 2.2 in one node."""

from __future__ import annotations

from typing import Any

from comfy_api.v0_0_2 import io

from .offload import advanced

NAMES = {
    "transformer": "model_high",
    "transformer_2": "model_low",
    "boundary_ratio": "boundary",
    "steps": "steps",
    "start_at_step": "start_at_step",
    "end_at_step": "end_at_step",
    "shift": "shift",
    "save_every": "save_every",
    "resume": "resume",
    "width": "width",
    "height": "height",
    "num_frames": "length",
    "latent_image": "latent_image",
    "positive": "positive",
    "negative": "negative",
}


class WanFitSampler(io.ComfyNode):
    """Two chained KSamplerAdvanced nodes whose split is computed instead of guessed."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        from ._comfy import sampler

        return io.Schema(
            node_id="WanFitSampler",
            display_name="WanFit Sampler",
            category="WanFit",
            description="Samples with the high-noise expert, then with the low-noise one. The step of the switch is "
            "computed from the noise levels that really run. The same result as two KSampler (Advanced) nodes at that "
            "step; works with every MODEL.",
            inputs=[
                io.Model.Input("model_high", tooltip="The high-noise expert, or the only model (TI2V-5B, Wan 2.1)."),
                io.Conditioning.Input("positive", tooltip="What the video shall show; from WanImageToVideo for I2V."),
                io.Conditioning.Input("negative", tooltip="What it shall not show; has no effect where cfg is 1."),
                io.Latent.Input("latent_image", tooltip="Empty video latent, or from WanImageToVideo."),
                io.Model.Input(
                    "model_low", optional=True, tooltip="The low-noise expert; left open for a model without experts."
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Start of the noise; the same seed and settings give the same video.",
                ),
                io.Int.Input(
                    "steps",
                    default=20,
                    min=1,
                    max=1000,
                    tooltip="Steps of both experts together: 20 to 40, or 4 to 8 with a 4-step LoRA. Fewer are faster "
                    "and less exact.",
                ),
                io.Float.Input(
                    "cfg_high",
                    default=3.5,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="Guidance of the high-noise expert: 3.5 to 4, or 1 with a 4-step LoRA. 1 halves the time.",
                ),
                io.Float.Input(
                    "cfg_low",
                    default=3.5,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="Guidance of the low-noise expert: 3 to 3.5, or 1 with a 4-step LoRA. 1 halves the time.",
                ),
                io.Combo.Input(
                    "sampler_name",
                    options=sampler.SAMPLERS,
                    default="euler",
                    tooltip="ComfyUI's samplers. euler: plain and safe; uni_pc: what Wan was published with.",
                ),
                io.Combo.Input(
                    "scheduler",
                    options=sampler.SCHEDULERS,
                    default="simple",
                    tooltip="ComfyUI's noise schedules. simple is what Wan was trained for.",
                ),
                io.Float.Input(
                    "shift",
                    default=5.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="Moves steps towards high noise; official: 5 for I2V and TI2V-5B, 12 for T2V. 0: as the "
                    "MODEL is set.",
                ),
                io.Float.Input(
                    "boundary",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.005,
                    tooltip="Noise level, 0 to 1, below which the low-noise expert works. 0: the model's official one, "
                    "0.9 for I2V and 0.875 for T2V.",
                ),
                advanced(io.Int.Input)(
                    "switch_step",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="First step of the low-noise expert. 0: computed from the boundary. A number that "
                    "disagrees with the boundary is used, and pointed out.",
                ),
                advanced(io.Int.Input)(
                    "start_at_step", default=0, min=0, max=10000, tooltip="First step that runs; 0 for all of them."
                ),
                advanced(io.Int.Input)(
                    "end_at_step", default=10000, min=0, max=10000, tooltip="Step before which to stop; 10000: the end."
                ),
                advanced(io.Combo.Input)(
                    "add_noise",
                    options=["enable", "disable"],
                    default="enable",
                    tooltip="disable: the latent already carries the noise of start_at_step.",
                ),
                advanced(io.Combo.Input)(
                    "return_with_leftover_noise",
                    options=["disable", "enable"],
                    default="disable",
                    tooltip="enable: leave the noise of end_at_step in the latent, for another sampler to go on.",
                ),
                advanced(io.Int.Input)(
                    "save_every",
                    default=1,
                    min=0,
                    max=1000,
                    tooltip="Keep checkpoints in output/wanfit_checkpoints after every so many model outputs (one a "
                    "step for most samplers), 8 to 20 MB each, until the run is complete. 0: none; a run that is "
                    "broken off is lost.",
                ),
                advanced(io.Combo.Input)(
                    "resume",
                    options=["off", "on"],
                    default="off",
                    tooltip="on: go on from the checkpoints that this node left when the same run was broken off; the "
                    "result is that of the undisturbed run. A changed graph is refused.",
                ),
            ],
            outputs=[
                io.Latent.Output("LATENT", display_name="latent", tooltip="The latent for VAE Decode."),
                io.String.Output("INFO", display_name="info", tooltip="Which steps ran on which expert, and why."),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(
        cls,
        model_high: object,
        positive: object,
        negative: object,
        latent_image: dict[str, Any],
        add_noise: str,
        return_with_leftover_noise: str,
        save_every: int,
        resume: str,
        model_low: object | None = None,
        **numbers: Any,
    ) -> io.NodeOutput:
        from ._comfy import errors, lora_files, sampler
        from ._comfy import resume as records

        with errors.in_words_of(NAMES, "denoise"):
            settings = sampler.Settings(
                add_noise=add_noise == "enable",
                return_with_leftover_noise=return_with_leftover_noise == "enable",
                **numbers,
            )
            kept = records.open_answers(str(cls.hidden.unique_id), save_every, resume == "on")
            latent, info = sampler.sample(model_high, model_low, positive, negative, latent_image, settings, kept)
            info = "\n".join([info, *lora_files.misplaced(cls.hidden.prompt or {}, str(cls.hidden.unique_id))])
        return io.NodeOutput(latent, info, ui={"text": (info,)})
