"""WanFitPlan: whether a video fits, before anything is loaded; sizes for the graph."""

from __future__ import annotations

from typing import Any

from comfy_api.v0_0_2 import io, ui

PRESETS = (
    "i2v-a14b:fp8", "i2v-a14b:bf16", "i2v-a14b:q8_0", "i2v-a14b:q6_k", "i2v-a14b:q5_k_m", "i2v-a14b:q4_k_m",
    "t2v-a14b:fp8", "t2v-a14b:bf16", "t2v-a14b:q8_0", "t2v-a14b:q4_k_m", "ti2v-5b:fp16", "ti2v-5b:q8_0",
    "t2v-14b:fp8", "i2v-14b:fp8", "t2v-1.3b:fp16",
)  # fmt: skip
NAMES = {
    "vram": "vram", "ram": "ram", "num_frames": "length", "transformer": "model", "transformer_2": "model_low",
    "batch": "batch_size",
}  # fmt: skip


class WanFitPlan(io.ComfyNode):
    """Reads headers only; its numbers can feed the nodes that make latents."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanFitPlan",
            display_name="WanFit Plan",
            category="WanFit",
            description="Says before the run what a video will need, stage by stage, whether it fits, and the nearest "
            "size and length that do. Width, height and length can feed the rest of the graph.",
            is_output_node=True,
            inputs=[
                io.Combo.Input(
                    "preset",
                    options=list(PRESETS),
                    tooltip="The model and its file type, when no MODEL is connected. Needs no file.",
                ),
                io.Int.Input(
                    "width", default=832, min=16, max=16384, step=16, tooltip="Pixels; multiple of 16, of 32 for 5B."
                ),
                io.Int.Input(
                    "height", default=480, min=16, max=16384, step=16, tooltip="Pixels; multiple of 16, of 32 for 5B."
                ),
                io.Int.Input("length", default=81, min=1, max=4093, step=4, tooltip="Frames: 4n+1, such as 81."),
                io.Combo.Input(
                    "policy",
                    options=["auto", "resident", "stream"],
                    default="auto",
                    tooltip="How blocks are placed, as in WanFit Offload Policy. stream needs least VRAM.",
                ),
                io.Float.Input(
                    "vram",
                    default=0.0,
                    min=0.0,
                    max=1024.0,
                    step=0.5,
                    tooltip="GiB of a card to plan for, such as 12. 0: this machine, with what ComfyUI can free.",
                ),
                io.Float.Input(
                    "ram",
                    default=0.0,
                    min=0.0,
                    max=65536.0,
                    step=1.0,
                    tooltip="GiB of RAM installed beside that card. 0: this machine's. Counts only with vram above 0.",
                ),
                io.Combo.Input(
                    "keep",
                    options=["size", "length"],
                    default="size",
                    tooltip="What to keep when it does not fit: size shortens the video, length makes it smaller.",
                ),
                io.Boolean.Input(
                    "adapt",
                    default=True,
                    tooltip="On: width, height and length come out as the nearest that fit. Off: as given.",
                ),
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="A MODEL from WanFit Load Wan Model; then its file and LoRAs count and not the preset.",
                ),
                io.Model.Input(
                    "model_low",
                    optional=True,
                    tooltip="The low-noise MODEL; without it a file like the first is taken.",
                ),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=4096,
                    optional=True,
                    tooltip="Videos at a time: batch_size of the node that makes the latents. They share one forward "
                    "and are decoded one after the other.",
                ),
                io.Boolean.Input(
                    "packed",
                    default=False,
                    optional=True,
                    tooltip="q, k and v of the attention in 8 bits, which a run takes only when memory has run out: "
                    "what it could still do.",
                ),
            ],
            outputs=[
                io.String.Output("REPORT", display_name="report", tooltip="Stages, causes, verdict, in GiB."),
                io.Image.Output("CHART", display_name="chart", tooltip="Each stage by cause, against what there is."),
                io.Boolean.Output("FITS", display_name="fits", tooltip="Whether what comes out here fits."),
                io.Int.Output("WIDTH", display_name="width", tooltip="As given, or adapted."),
                io.Int.Output("HEIGHT", display_name="height", tooltip="As given, or adapted."),
                io.Int.Output("LENGTH", display_name="length", tooltip="Frames as given, or adapted."),
            ],
        )

    @classmethod
    def execute(cls, adapt: bool, **settings: Any) -> io.NodeOutput:
        from ._comfy import errors, plan

        with errors.in_words_of(NAMES, "plan"):
            found = plan.make(plan.Wanted(**settings), adapt=adapt)
        shown = ui.PreviewImage(found.chart, cls=cls).as_dict()
        text = found.report
        return io.NodeOutput(
            text, found.chart, found.fits, found.width, found.height, found.length, ui={**shown, "text": (text,)}
        )
