"""WanFitMemoryProbe: what memory the graph has taken up to this point."""

from __future__ import annotations

from comfy_api.v0_0_2 import io, ui


class WanFitMemoryProbe(io.ComfyNode):
    """Passes anything through; works in any graph."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanFitMemoryProbe",
            display_name="WanFit Memory Probe",
            category="WanFit",
            description="Reports RAM and VRAM at this point and the peaks since the run began or the probe before, "
            "with a chart.",
            is_output_node=True,
            inputs=[
                io.AnyType.Input("anything", tooltip="Passed through unchanged; decides when the probe measures."),
                io.String.Input(
                    "label",
                    default="stage",
                    tooltip="Name of the stage that ends here, for table and chart: sampling high, decode ...",
                ),
            ],
            outputs=[
                io.AnyType.Output("ANYTHING", display_name="anything", tooltip="The input, unchanged."),
                io.String.Output("REPORT", display_name="report", tooltip="Table of all stages so far, in GiB."),
                io.Image.Output("CHART", display_name="chart", tooltip="RAM and VRAM over time, with the stages."),
            ],
        )

    @classmethod
    def execute(cls, anything: object, label: str) -> io.NodeOutput:
        from ._comfy import probe

        report, chart = probe.measure(label)
        shown = ui.PreviewImage(chart, cls=cls).as_dict()
        return io.NodeOutput(anything, report, chart, ui={**shown, "text": (report,)})
