"""Names of the tiny model files of the server tests, and what the tests ask of a core."""

from __future__ import annotations

import numpy as np
from comfyui_server import Tree

HIGH = "wan2.2_i2v_high_noise_tiny_bf16.safetensors"
LOW = "wan2.2_i2v_low_noise_tiny_bf16.safetensors"
HIGH_FP8 = "wan2.2_i2v_high_noise_tiny_fp8_scaled.safetensors"
HIGH_FP8_PLAIN = "wan2.2_i2v_high_noise_tiny_fp8_dequantised.safetensors"
HIGH_QUANT = "wan2.2_i2v_high_noise_tiny_comfy_quant.safetensors"
HIGH_QUANT_PLAIN = "wan2.2_i2v_high_noise_tiny_comfy_quant_dequantised.safetensors"
HIGH_GGUF = "Wan2.2-I2V-HighNoise-tiny-Q8_0.gguf"
LOW_GGUF = "Wan2.2-I2V-LowNoise-tiny-Q4_K_M.gguf"
T2V_HIGH = "wan2.2_t2v_high_noise_tiny_bf16.safetensors"
T2V_LOW = "wan2.2_t2v_low_noise_tiny_bf16.safetensors"
TI2V = "wan2.2_ti2v_tiny_5B_bf16.safetensors"
DEEP = "wan2.2_t2v_high_noise_tiny_8_blocks_bf16.safetensors"
WAN21 = "wan2.1_i2v_tiny_14B_bf16.safetensors"
LORA = "tiny_lora.safetensors"
LORA_TOO_LARGE = "tiny_lora_of_infinity.safetensors"
VAE = "wan_2.1_vae.safetensors"
VAE_22 = "wan2.2_vae.safetensors"
TEXT = "umt5-xxl-encoder-Q8_0.gguf"


def is_old(tree: Tree) -> bool:
    """Cores that fix the VAE's width, read scaled fp8 inexactly and new quantisations as garbage."""
    return tuple(int(part) for part in tree.version.split(".")[:2]) < (0, 4)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """|actual - expected| / |expected|, as vectors, in float64."""
    expected = expected.astype(np.float64)
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


FILE_INPUTS = ("model_high", "model_low", "vae_name", "lora_name", "text_encoder")


def tiny_name(name: str) -> str:
    """The tiny file that stands for one that a workflow names."""
    lower = name.lower()
    if name == "none" or "vae" in lower or lower.startswith("umt5"):
        return {"none": "none", "wan2.2_vae.safetensors": VAE_22}.get(name, TEXT if "umt5" in lower else VAE)
    if "lightx2v" in lower:
        return LORA
    if "5b" in lower:
        return TI2V
    is_low = "low" in lower
    if "t2v_" in lower and "i2v" not in lower:
        return T2V_LOW if is_low else T2V_HIGH
    if lower.endswith(".gguf"):
        return LOW_GGUF if is_low else HIGH_GGUF
    return LOW if is_low else HIGH
