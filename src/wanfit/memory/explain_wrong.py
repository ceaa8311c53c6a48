"""Failures that are no lack of memory: another model's part, a size, a setting, a kernel that a card does not have."""

from __future__ import annotations

import re

from .explanation import Explanation, Facts


def float8_kernel(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    if "fp8e4nv not supported" not in text:
        return None
    return Explanation(
        "float8 kernel",
        "Triton has no float8 e4m3 conversion for this card (it needs compute capability 8.9)",
        "Switch torch.compile off for this model, or use a GGUF or e5m2 file",
    )


def channels(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    """A convolution that was given another model's tensor."""
    found = re.search(
        r"weight of size \[([\d, ]+)\], expected input\[[\d, ]+\] to have (\d+) channels, but got (\d+)", text
    )
    if found is None:
        return None
    shape = [int(size) for size in found[1].split(",")]
    wanted, got = int(found[2]), int(found[3])
    if shape[2:] == [1, 2, 2]:  # a transformer's patch embedding
        kinds = {16: "a T2V model", 36: "an I2V model", 48: "TI2V-5B"}
        return Explanation(
            "wrong model",
            f"The transformer takes {wanted} channels ({kinds.get(wanted, 'another model')}) and was given {got}",
            "Use an I2V model where an image is connected and a T2V model where none is, and update ComfyUI",
        )
    if {wanted, got} == {16, 48}:
        vae = "Wan 2.2 VAE (48 channels, for TI2V-5B only)" if wanted == 48 else "Wan 2.1 VAE (16 channels)"
        other = "wan_2.1_vae.safetensors" if wanted == 48 else "wan2.2_vae.safetensors"
        return Explanation("wrong VAE", f"The {vae} was given latents of {got} channels", f"Load {other} instead")
    return None


def odd_size(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    found = re.search(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)", text)
    if found is None or abs(int(found[1]) - int(found[2])) != 1:
        return None
    return Explanation(
        "size",
        f"Two sizes differ by one ({found[1]} and {found[2]}): <width> or <height> is no multiple of what the model "
        "takes",
        "Use multiples of 16 (TI2V-5B: 32), for example 1088 instead of 1080",
    )


def allocator_settings(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    if not any(
        mark in text
        for mark in ("CachingAllocator option", "ConfigTokenizer", "garbage_collect", "For roundups", "AllocatorConfig")
    ):
        return None
    return Explanation(
        "allocator settings",
        f"PyTorch rejected a value of PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF: {text.splitlines()[0][:160]}",
        "Correct it as <doctor> says, or unset both variables",
    )


def devices(error: BaseException, text: str, facts: Facts) -> Explanation | None:
    if "Expected all tensors to be on the same device" not in text:
        return None
    return Explanation(
        "two devices",
        f"Parts of the model are on different devices: {text.splitlines()[0][:160]}",
        "Let one program place the model: remove nodes that choose a device",
    )
