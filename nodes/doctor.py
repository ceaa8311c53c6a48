"""WanFitDoctor: what this machine and this ComfyUI are, and what WanFit uses of them."""

from __future__ import annotations

from comfy_api.v0_0_2 import io


class WanFitDoctor(io.ComfyNode):
    """Reads only, changes nothing."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanFitDoctor",
            display_name="WanFit Doctor",
            category="WanFit",
            description="Examines PyTorch, driver, card, allocator, RAM limits and ComfyUI's options, and says what "
            "WanFit uses here and why not more. Changes nothing.",
            is_output_node=True,
            not_idempotent=True,
            inputs=[
                io.Boolean.Input(
                    "disk",
                    default=False,
                    tooltip="On: read from the largest model file for up to 3 seconds, to measure the disk.",
                ),
            ],
            outputs=[
                io.String.Output("REPORT", display_name="report", tooltip="Findings by topic; ! warning, X wrong."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, disk: bool) -> float:
        return float("nan")

    @classmethod
    def execute(cls, disk: bool) -> io.NodeOutput:
        from ._comfy import doctor

        report = doctor.report(disk=disk)
        return io.NodeOutput(report, ui={"text": (report,)})
