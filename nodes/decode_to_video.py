"""WanFitDecodeToVideo: exact decode straight into a video, frame by frame."""

from __future__ import annotations

from comfy_api.v0_0_2 import io

NAMES = {
    "latents": "samples",
    "vae": "vae",
    "budget_bytes": "vram_budget",
    "audio": "audio",
    "out": "ComfyUI's temp folder (--temp-directory)",
    "spool_directory": "temp folder (--temp-directory)",
}


class WanFitDecodeToVideo(io.ComfyNode):
    """The same pixels as WanFitVAEDecode; no IMAGE of all frames is ever made."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanFitDecodeToVideo",
            display_name="WanFit Decode to Video",
            category="WanFit",
            description="Decodes Wan latents exactly, straight into a video: each frame is encoded as soon as it is "
            "complete, so VRAM and RAM do not depend on the length. Connect Save Video.",
            inputs=[
                io.Latent.Input("samples", tooltip="Latent of a Wan model, as its sampler gives it."),
                io.Vae.Input("vae", tooltip="wan_2.1_vae for the 14B models, wan2.2_vae for TI2V-5B."),
                io.Float.Input(
                    "fps",
                    default=16.0,
                    min=1.0,
                    max=120.0,
                    step=0.01,
                    tooltip="Frames a second, 1 to 120: 16 for the 14B models, 24 for TI2V-5B.",
                ),
                io.Float.Input(
                    "vram_budget",
                    default=0.0,
                    min=0.0,
                    max=192.0,
                    step=0.1,
                    tooltip="GiB of VRAM for the VAE and its work, 0 to 192; 0: what is free. Less means smaller tiles "
                    "and more time; the pixels stay the same.",
                ),
                io.Audio.Input(
                    "audio", optional=True, tooltip="Sound for the video, cut where the frames end. Empty: silent."
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[
                io.Video.Output(
                    "VIDEO", display_name="video", tooltip="The video, H.264 in MP4, in ComfyUI's temp folder."
                )
            ],
        )

    @classmethod
    def execute(
        cls,
        samples: dict[str, object],
        vae: object,
        fps: float,
        vram_budget: float,
        audio: dict[str, object] | None = None,
    ) -> io.NodeOutput:
        from ._comfy import decode_to_video, errors

        with errors.in_words_of(NAMES, "decode"):
            made = decode_to_video.video(samples, vae, fps, vram_budget, audio, str(cls.hidden.unique_id))
            return io.NodeOutput(made)
