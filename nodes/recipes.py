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
class Chinese:
    """The texts of a recipe in Chinese; the same numbers."""

    title: str
    audience: str
    needs: str
    if_it_fails: str
    variations: tuple[str, ...] = ()


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
    zh: Chinese
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


_I2V_VARIATIONS_ZH = (
    "首尾帧：工作流 wan22_flf2v_16gb，模型相同。",
    "文生视频：用 EmptyHunyuanLatentVideo 代替 WanImageToVideo，把提示词直接连到采样器，并选择 T2V 文件。",
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
        zh=Chinese(
            title="Wan 2.2 图生视频，12 GB",
            audience="12 GB 显卡，32 GB 内存。",
            needs="估计值，未实测：显存 8 GiB，内存 24 GiB。",
            if_it_fails="把 policy 设为 stream；再把 length 从 81 改为 49；再把 832x480 改为 640x384。",
            variations=_I2V_VARIATIONS_ZH,
        ),
        model_high="Wan2.2-I2V-A14B-HighNoise-Q4_K_M.gguf",
        model_low="Wan2.2-I2V-A14B-LowNoise-Q4_K_M.gguf",
        vram_budget=10.0,
    ),
    "wan22_i2v_16gb": _i2v(
        title="Wan 2.2 image to video, 16 GB",
        audience="A card with 16 GB and 32 GB of RAM or more.",
        needs="Measured: 10.7 GiB of VRAM (most of it ComfyUI's encode of the image), 30 GiB of RAM.",
        if_it_fails="Set the policy to stream; then take the Q4_K_M files of the 12 GB workflow.",
        zh=Chinese(
            title="Wan 2.2 图生视频，16 GB",
            audience="16 GB 显卡，32 GB 或更多内存。",
            needs="实测：显存 10.7 GiB（大部分是 ComfyUI 编码图像），内存 30 GiB。",
            if_it_fails="把 policy 设为 stream；再改用 12 GB 工作流的 Q4_K_M 文件。",
            variations=_I2V_VARIATIONS_ZH,
        ),
        vram_budget=14.0,
    ),
    "wan22_i2v_24gb": _i2v(
        title="Wan 2.2 image to video, 24 GB",
        audience="A card with 24 GB and 48 GB of RAM or more.",
        needs="Estimate, not measured: 21 GiB of VRAM, 40 GiB of RAM.",
        if_it_fails="Set the policy to stream; then 1280x720 to 832x480.",
        zh=Chinese(
            title="Wan 2.2 图生视频，24 GB",
            audience="24 GB 显卡，48 GB 或更多内存。",
            needs="估计值，未实测：显存 21 GiB，内存 40 GiB。",
            if_it_fails="把 policy 设为 stream；再把 1280x720 改为 832x480。",
            variations=_I2V_VARIATIONS_ZH,
        ),
        width=1280,
        height=720,
        vram_budget=22.0,
    ),
    "wan22_t2v_16gb": _i2v(
        title="Wan 2.2 text to video, 16 GB",
        audience="A card with 16 GB and 32 GB of RAM or more.",
        needs="Estimate, not measured: 13 GiB of VRAM, 32 GiB of RAM.",
        if_it_fails="Set the policy to stream; then length 81 to 49.",
        zh=Chinese(
            title="Wan 2.2 文生视频，16 GB",
            audience="16 GB 显卡，32 GB 或更多内存。",
            needs="估计值，未实测：显存 13 GiB，内存 32 GiB。",
            if_it_fails="把 policy 设为 stream；再把 length 从 81 改为 49。",
        ),
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
        zh=Chinese(
            title="Wan 2.2 首尾帧生视频，16 GB",
            audience="16 GB 显卡，32 GB 或更多内存：从一张图到另一张图的视频。",
            needs="估计值，未实测：显存 13 GiB，内存 32 GiB。",
            if_it_fails="把 policy 设为 stream；再改用 12 GB 工作流的 Q4_K_M 文件。",
            variations=("只用尾帧：删除 start_image 的连线。",),
        ),
        kind="flf2v",
        variations=("Last image only: delete the link of start_image.",),
        vram_budget=14.0,
    ),
    "wan22_ti2v_5b_12gb": _i2v(
        title="Wan 2.2 5B image to video, 12 GB",
        audience="A card with 12 GB and 24 GB of RAM.",
        needs="Estimate, not measured: 9 GiB of VRAM, 20 GiB of RAM.",
        if_it_fails="Set the policy to stream; then length 121 to 81.",
        zh=Chinese(
            title="Wan 2.2 5B 图生视频，12 GB",
            audience="12 GB 显卡，24 GB 内存。",
            needs="估计值，未实测：显存 9 GiB，内存 20 GiB。",
            if_it_fails="把 policy 设为 stream；再把 length 从 121 改为 81。",
            variations=("文生视频：删除图像的连线。",),
        ),
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
        zh=Chinese(
            title="Wan 2.2 四步图生视频，16 GB",
            audience="16 GB 显卡，32 GB 内存，求快：4 步，使用 lightx2v LoRA。",
            needs="实测：显存 10.7 GiB（大部分是 ComfyUI 编码图像），内存 31 GiB。",
            if_it_fails="把 policy 设为 stream；再把 length 从 81 改为 49。",
            variations=_I2V_VARIATIONS_ZH,
        ),
        steps=4,
        cfg=1.0,
        vram_budget=14.0,
        loras=(
            "wan2.2_i2v_lightx2v_4steps_lora_v1_high_noise.safetensors",
            "wan2.2_i2v_lightx2v_4steps_lora_v1_low_noise.safetensors",
        ),
    ),
}
