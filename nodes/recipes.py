"""What each shipped workflow is set to, and where its files come from. Plain data: no ComfyUI, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_COMFY = "https://huggingface.co/Comfy-Org/Wan_2.2_ComfyUI_Repackaged/resolve/main/split_files"
_TEXT = "https://huggingface.co/Comfy-Org/Wan_2.1_ComfyUI_repackaged/resolve/main/split_files/text_encoders"
_GGUF = "https://huggingface.co/QuantStack"

TEXT_ENCODER = "umt5_xxl_fp8_e4m3fn_scaled.safetensors"
VAE_21 = "wan_2.1_vae.safetensors"
VAE_22 = "wan2.2_vae.safetensors"

DOWNLOADS: Mapping[str, str] = {
    "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors": f"{_COMFY}/diffusion_models/"
    "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors",
    "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors": f"{_COMFY}/diffusion_models/"
    "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors",
    "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors": f"{_COMFY}/diffusion_models/"
    "wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors",
    "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors": f"{_COMFY}/diffusion_models/"
    "wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors",
    "wan2.2_ti2v_5B_fp16.safetensors": f"{_COMFY}/diffusion_models/wan2.2_ti2v_5B_fp16.safetensors",
    "Wan2.2-I2V-A14B-HighNoise-Q4_K_M.gguf": f"{_GGUF}/Wan2.2-I2V-A14B-GGUF/resolve/main/HighNoise/"
    "Wan2.2-I2V-A14B-HighNoise-Q4_K_M.gguf",
    "Wan2.2-I2V-A14B-LowNoise-Q4_K_M.gguf": f"{_GGUF}/Wan2.2-I2V-A14B-GGUF/resolve/main/LowNoise/"
    "Wan2.2-I2V-A14B-LowNoise-Q4_K_M.gguf",
    "wan2.2_i2v_lightx2v_4steps_lora_v1_high_noise.safetensors": f"{_COMFY}/loras/"
    "wan2.2_i2v_lightx2v_4steps_lora_v1_high_noise.safetensors",
    "wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors": f"{_COMFY}/loras/"
    "wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors",
    TEXT_ENCODER: f"{_TEXT}/{TEXT_ENCODER}",
    VAE_21: f"{_COMFY}/vae/{VAE_21}",
    VAE_22: f"{_COMFY}/vae/{VAE_22}",
}
"""Public address of every file that a workflow names."""


@dataclass(frozen=True)
class Recipe:
    """The values of one workflow.

    Args:
        audience: for whom it is.
        needs: VRAM and RAM: "Measured" (docs/measurements/workflow_*.json), or an estimate that says so.
        if_it_fails: what to change first.
        model_low: "none" for a model without experts.
        variations: what else it makes, and the one node to change for it.
        tile_size: of the decode in pixels; 0 for automatic.
    """

    title: str
    audience: str
    needs: str
    if_it_fails: str
    kind: str
    model_high: str
    model_low: str
    vae: str
    width: int
    height: int
    length: int
    fps: int
    steps: int
    cfg: float
    shift: float
    sampler: str
    policy: str
    vram_budget: float
    variations: tuple[str, ...] = ()
    tile_size: int = 0
    loras: tuple[str, ...] = ()

    @property
    def experts(self) -> bool:
        """Whether two models take turns."""
        return self.model_low != "none"


_I2V_VARIATIONS = (
    "First and last frame: the workflow wan22_flf2v_16gb. Same models.",
    "Text to video: put EmptyHunyuanLatentVideo in the place of WanImageToVideo, connect the prompts to the sampler, "
    "and choose the T2V files.",
)


def _i2v(**changes: object) -> Recipe:
    values: dict[str, object] = {
        "kind": "i2v",
        "model_high": "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors",
        "model_low": "wan2.2_i2v_low_noise_14B_fp8_scaled.safetensors",
        "vae": VAE_21,
        "width": 832,
        "height": 480,
        "length": 81,
        "fps": 16,
        "steps": 20,
        "cfg": 3.5,
        "shift": 5.0,
        "sampler": "euler",
        "policy": "auto",
        "variations": _I2V_VARIATIONS,
    }
    return Recipe(**{**values, **changes})  # type: ignore[arg-type]


RECIPES: Mapping[str, Recipe] = {
    "wan22_i2v_12gb": _i2v(
        title="Wan 2.2 image to video, 12 GB",
        audience="A card with 12 GB and 32 GB of RAM.",
        needs="Estimate, not measured: 8 GiB of VRAM, 24 GiB of RAM.",
        if_it_fails="Set the policy to stream; then length 81 to 49; then 832x480 to 640x384.",
        model_high="Wan2.2-I2V-A14B-HighNoise-Q4_K_M.gguf",
        model_low="Wan2.2-I2V-A14B-LowNoise-Q4_K_M.gguf",
        vram_budget=10.0,
    ),
    "wan22_i2v_16gb": _i2v(
        title="Wan 2.2 image to video, 16 GB",
        audience="A card with 16 GB and 32 GB of RAM or more.",
        needs="Measured: 10.7 GiB of VRAM (most of it ComfyUI's encode of the image), 30 GiB of RAM.",
        if_it_fails="Set the policy to stream; then take the Q4_K_M files of the 12 GB workflow.",
        vram_budget=14.0,
    ),
    "wan22_i2v_24gb": _i2v(
        title="Wan 2.2 image to video, 24 GB",
        audience="A card with 24 GB and 48 GB of RAM or more.",
        needs="Estimate, not measured: 21 GiB of VRAM, 40 GiB of RAM.",
        if_it_fails="Set the policy to stream; then 1280x720 to 832x480.",
        width=1280,
        height=720,
        vram_budget=22.0,
    ),
    "wan22_t2v_16gb": _i2v(
        title="Wan 2.2 text to video, 16 GB",
        audience="A card with 16 GB and 32 GB of RAM or more.",
        needs="Estimate, not measured: 13 GiB of VRAM, 32 GiB of RAM.",
        if_it_fails="Set the policy to stream; then length 81 to 49.",
        kind="t2v",
        variations=(),
        model_high="wan2.2_t2v_high_noise_14B_fp8_scaled.safetensors",
        model_low="wan2.2_t2v_low_noise_14B_fp8_scaled.safetensors",
        vram_budget=14.0,
    ),
    "wan22_flf2v_16gb": _i2v(
        title="Wan 2.2 first and last frame, 16 GB",
        audience="A card with 16 GB and 32 GB of RAM or more: a video from one image to another.",
        needs="Estimate, not measured: 13 GiB of VRAM, 32 GiB of RAM.",
        if_it_fails="Set the policy to stream; then take the Q4_K_M files of the 12 GB workflow.",
        kind="flf2v",
        variations=("Last image only: delete the link of start_image.",),
        vram_budget=14.0,
    ),
    "wan22_ti2v_5b_12gb": _i2v(
        title="Wan 2.2 5B image to video, 12 GB",
        audience="A card with 12 GB and 24 GB of RAM.",
        needs="Estimate, not measured: 9 GiB of VRAM, 20 GiB of RAM.",
        if_it_fails="Set the policy to stream; then length 121 to 81.",
        kind="ti2v",
        variations=("Text to video: delete the link of the image.",),
        model_high="wan2.2_ti2v_5B_fp16.safetensors",
        model_low="none",
        vae=VAE_22,
        width=1280,
        height=704,
        length=121,
        fps=24,
        cfg=5.0,
        shift=8.0,
        sampler="uni_pc",
        vram_budget=10.0,
    ),
    "wan22_i2v_16gb_4step": _i2v(
        title="Wan 2.2 image to video in 4 steps, 16 GB",
        audience="A card with 16 GB and 32 GB of RAM, for speed: 4 steps with the lightx2v LoRAs.",
        needs="Measured: 10.7 GiB of VRAM (most of it ComfyUI's encode of the image), 31 GiB of RAM.",
        if_it_fails="Set the policy to stream; then length 81 to 49.",
        steps=4,
        cfg=1.0,
        vram_budget=14.0,
        loras=(
            "wan2.2_i2v_lightx2v_4steps_lora_v1_high_noise.safetensors",
            "wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors",
        ),
    ),
}
