"""WanFitVAEDecode: exact decode of a video in tiles that fit the memory."""

from __future__ import annotations

from comfy_api.v0_0_2 import io

NAMES = {"latents": "samples", "vae": "vae", "grid": "tile_size", "num_frames": "length"}


class WanFitVAEDecode(io.ComfyNode):
    """The picture of ComfyUI's untiled decode, without its peak."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="WanFitVAEDecode",
            display_name="WanFit VAE Decode",
            category="WanFit",
            description="Decodes Wan latents in spatial tiles with a true halo: no seams, no flicker, the same as the "
            "untiled decode. Frames go to RAM as they are made.",
            inputs=[
                io.Latent.Input("samples", tooltip="Latent of a Wan model, as its sampler gives it."),
                io.Vae.Input("vae", tooltip="wan_2.1_vae for the 14B models, wan2.2_vae for TI2V-5B."),
                io.Int.Input(
                    "tile_size",
                    default=0,
                    min=0,
                    max=4096,
                    step=16,
                    tooltip="Edge of a tile in pixels, 128 to 4096; 0: as large as fits the free VRAM. Smaller tiles "
                    "take less VRAM and more time; the pixels stay the same.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
            outputs=[io.Image.Output("IMAGE", display_name="image", tooltip="The frames, float32 in 0 to 1, in RAM.")],
        )

    @classmethod
    def execute(cls, samples: dict[str, object], vae: object, tile_size: int) -> io.NodeOutput:
        from ._comfy import decode, errors

        with errors.in_words_of(NAMES, "decode"):
            return io.NodeOutput(decode.images(samples, vae, tile_size, str(cls.hidden.unique_id)))
