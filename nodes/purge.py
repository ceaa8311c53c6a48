"""WanFitPurge: give memory back at this point of the graph, and say how much it was."""

from __future__ import annotations

from comfy_api.v0_0_2 import io


class WanFitPurge(io.ComfyNode):
    """Passes anything through; works in any graph."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanFitPurge",
            display_name="WanFit Purge Memory",
            category="WanFit",
            description="Releases memory when the graph comes to this point, and reports before and after.",
            is_output_node=True,
            inputs=[
                io.AnyType.Input("anything", tooltip="Passed through unchanged; decides when the purge happens."),
                io.Combo.Input(
                    "release",
                    options=["this model", "all models", "device cache", "host cache", "node cache"],
                    default="all models",
                    tooltip="this model: the MODEL, CLIP or VAE that is passed through leaves VRAM. all models: every "
                    "loaded model does. device cache: only memory that PyTorch holds unused. host cache: RAM copies of "
                    "WanFit's blocks; they are read from disk again when needed. node cache: results that ComfyUI "
                    "keeps, after this prompt has ended; the next prompt runs everything again.",
                ),
            ],
            outputs=[
                io.AnyType.Output("ANYTHING", display_name="anything", tooltip="The input, unchanged."),
                io.String.Output("REPORT", display_name="report", tooltip="RAM and VRAM before and after, in GiB."),
            ],
        )

    @classmethod
    def execute(cls, anything: object, release: str) -> io.NodeOutput:
        from ._comfy import errors, purge

        with errors.in_words_of({}):
            report = purge.release(anything, release)
        return io.NodeOutput(anything, report, ui={"text": (report,)})
