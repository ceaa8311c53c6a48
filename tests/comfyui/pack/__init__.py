"""Nodes that only tests need: conditioning without a text encoder, tensors written as they are."""

from __future__ import annotations

from pathlib import Path

import folder_paths
import numpy as np
import torch


class TestConditioning:
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}}

    def run(self, seed):
        generator = torch.Generator().manual_seed(seed)
        return ([[torch.randn(1, 512, 4096, generator=generator), {}]],)


class TestSaveTensor:
    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"name": ("STRING", {"default": "x"})},
            "optional": {"image": ("IMAGE",), "latent": ("LATENT",)},
        }

    def run(self, name, image=None, latent=None):
        tensor = image if latent is None else latent["samples"]
        np.save(Path(folder_paths.get_output_directory()) / f"{name}.npy", tensor.float().cpu().numpy())
        return {"ui": {"text": [name]}}


class TestLatent:
    """Random latents of any shape."""

    RETURN_TYPES = ("LATENT",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        sizes = {name: ("INT", {"default": 1, "min": 0}) for name in ("batch", "channels", "frames", "height", "width")}
        return {"required": {**sizes, "seed": ("INT", {"default": 0})}}

    def run(self, batch, channels, frames, height, width, seed):
        generator = torch.Generator().manual_seed(seed)
        return ({"samples": torch.randn(batch, channels, frames, height, width, generator=generator)},)


class TestBlockPatch:
    """Puts a patch on a MODEL that reaches into its blocks, as other node packs do."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "kind": ("STRING", {"default": "attn1_patch"})}}

    def run(self, model, kind):
        model = model.clone()
        if kind == "skip block 0":
            model.set_model_patch_replace(lambda args, extra: {"img": args["img"]}, "dit", "double_block", 0)
        elif kind == "keep input of block 1":
            model.set_model_patch_replace(_difference_is_kept, "dit", "double_block", 1)
        else:
            model.set_model_patch(lambda args: args, kind)
        return (model,)


def _difference_is_kept(args, extra):
    before = args["img"]
    out = extra["original_block"](args)
    return {"img": before + (out["img"] - before)}


NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in (TestConditioning, TestSaveTensor, TestLatent, TestBlockPatch)}
