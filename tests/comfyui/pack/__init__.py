"""Nodes that only tests need: conditioning without a text encoder, tensors written as they are, accidents on demand."""

from __future__ import annotations

import dataclasses
import gc
import json
import sys
from pathlib import Path
from typing import ClassVar

import folder_paths
import numpy as np
import torch
from server import PromptServer

import nodes


class TestConditioning:
    RETURN_TYPES = ("CONDITIONING",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"seed": ("INT", {"default": 0})}, "optional": {"tokens": ("INT", {"default": 16})}}

    def run(self, seed, tokens=16):
        """A text encoder gives 512 tokens; projecting those is most of a tiny model's time."""
        generator = torch.Generator().manual_seed(seed)
        return ([[torch.randn(1, tokens, 4096, generator=generator), {}]],)


class TestSaveTensor:
    RETURN_TYPES = ()
    FUNCTION = "run"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {
            "required": {"name": ("STRING", {"default": "x"})},
            "optional": {"image": ("IMAGE",), "latent": ("LATENT",), "conditioning": ("CONDITIONING",)},
        }

    def run(self, name, image=None, latent=None, conditioning=None):
        tensor = image if latent is None else latent["samples"]
        if conditioning is not None:
            tensor = conditioning[0][0]
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


class TestWatchBlocks:
    """Writes down when blocks begin and end, and lets something happen in the middle of one."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        numbers = {name: ("INT", {"default": 0}) for name in ("block", "forward", "times")}
        return {"required": {"model": ("MODEL",), "name": ("STRING", {}), "event": ("STRING", {}), **numbers}}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def run(self, model, **settings):
        model = model.clone()
        watch = Watch(**settings)
        for index in range(len(model.model.diffusion_model.blocks)):
            model.set_model_patch_replace(watch.around(index), "dit", "double_block", index)
        model.model_options["transformer_options"]["optimized_attention_override"] = watch.attention
        return (model,)


class Watch:
    def __init__(self, name, event, block, forward, times):
        self.path = Path(folder_paths.get_output_directory()) / f"{name}.txt"
        self.path.write_text("")
        self.event, self.place, self.times = event, (forward, block), times
        self.forward, self.block = -1, -1

    def note(self, what):
        with self.path.open("a") as file:
            file.write(f"{what} {self.forward}.{self.block}\n")

    def around(self, index):
        def patch(args, extra):
            self.forward, self.block = self.forward + (index == 0), index
            self.note("start")
            out = extra["original_block"](args)
            self.note("end")
            return out

        return patch

    def attention(self, function, *args, **kwargs):
        if self.times and (self.forward, self.block) >= self.place:
            self.times -= 1
            self.note(self.event)
            if self.event == "interrupt":
                nodes.interrupt_processing()
            else:
                raise torch.OutOfMemoryError("CUDA out of memory. Injected by a test.")
        return function(*args, **kwargs)


class TestEmbedding:
    """Writes down how many bytes ComfyUI's embedding of the latent had, and has when the blocks have run."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "name": ("STRING", {})}}

    def run(self, model, name):
        path = Path(folder_paths.get_output_directory()) / f"{name}.txt"
        path.write_text("")
        seen = []
        diffusion = model.model.diffusion_model
        diffusion.patch_embedding.register_forward_hook(lambda *given: seen.append((given[2], given[2].nbytes)))

        def after(*_):
            embedding, before = seen.pop()
            with path.open("a") as file:
                file.write(f"{before} {embedding.untyped_storage().nbytes()}\n")

        diffusion.head.register_forward_hook(after)
        return (model,)


class TestFillDevice:
    """Takes the device's memory but for some MiB; below zero: gives it back."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "test"
    HELD: ClassVar = []

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "leave": ("INT", {"default": 0, "min": -1})}}

    def run(self, model, leave):
        self.HELD.clear()
        torch.cuda.empty_cache()
        kept = torch.empty(max(0, leave) * 2**20, dtype=torch.uint8, device="cuda")
        piece = 2**33 if leave >= 0 else 0
        while piece >= 2**21:
            try:
                self.HELD.append(torch.empty(piece, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError:
                piece //= 4
        del kept
        return (model,)


class TestMoveText:
    """Copies a text encoder's tensors, as moves to a device and back do; says how many did not come back to the file."""

    RETURN_TYPES = ("CLIP", "STRING")
    FUNCTION = "run"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"clip": ("CLIP",)}}

    def run(self, clip):
        model = clip.patcher.model
        before = {name: tensor.data_ptr() for name, tensor in model.named_buffers() if tensor.numel() > 1}
        model._apply(lambda tensor: tensor.clone())
        after = {name: tensor.data_ptr() for name, tensor in model.named_buffers() if tensor.numel() > 1}
        moved = sum(before[name] != after[name] for name in before)
        return {"ui": {"text": [f"{moved} of {len(before)}"]}, "result": (clip, "")}


class TestTextFails:
    """A text encoder that asks for more memory than there is when it is used next; as another node's copy of it."""

    RETURN_TYPES = ("CLIP",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"clip": ("CLIP",), "place": (["load", "forward"],), "nbytes": ("STRING", {})}}

    @classmethod
    def IS_CHANGED(cls, **_):
        return float("nan")

    def run(self, clip, place, nbytes):
        clip = clip.clone()
        if place == "forward":
            handle = clip.cond_stage_model.umt5xxl.transformer.register_forward_pre_hook(lambda *_: fail())
        else:
            original, clip.load_model = clip.load_model, lambda *_: fail()

        def fail():
            if place == "forward":
                handle.remove()
            else:
                clip.load_model = original
            device = "cuda" if torch.cuda.is_available() else "cpu"
            torch.empty(int(nbytes), dtype=torch.uint8, device=device)

        return (clip,)


class TestMargin:
    """Sets the margin of a WanFit MODEL's memory alarm: 0 for the usual one, else GiB that have to be free."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "test"

    @classmethod
    def INPUT_TYPES(cls):
        return {"required": {"model": ("MODEL",), "gib": ("INT", {"default": 0, "max": 2**30})}}

    def run(self, model, gib):
        runtime = model.model.wanfit_runtime
        alarm = sys.modules[sys.modules[type(runtime).__module__].Alarm.__module__]
        margins = alarm.Margins(0, gib * 2**30) if gib else None
        runtime.alarm = alarm.Alarm(torch.device("cpu"), margins, interval_s=0)
        return (model,)


class TestMemoryRequired:
    """What a WanFit MODEL tells ComfyUI that sampling a latent takes, on this machine or on a card that is stated."""

    RETURN_TYPES = ("MODEL",)
    FUNCTION = "run"
    CATEGORY = "test"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls):
        sizes = {name: ("INT", {"default": 1}) for name in ("batch", "channels", "frames", "height", "width")}
        return {"required": {"model": ("MODEL",), "card": ("BOOLEAN", {"default": False}), **sizes}}

    def run(self, model, card, batch, channels, frames, height, width):
        runtime = model.model.wanfit_runtime
        device = model.load_device
        if card:
            stated = dataclasses.replace(
                runtime.machine(device), device="cuda", dtype=torch.bfloat16, float8=True, fused=True
            )
            runtime.machine = lambda device: stated
        runtime.preparing = model
        try:
            machine = runtime.machine(device)
            required = model.model.memory_required([batch, channels, frames, height, width])
        finally:
            runtime.preparing = None
            vars(runtime).pop("machine", None)
        told = {name: getattr(machine, name) for name in ("device", "float8", "fused")}
        told |= {"required": required, "dtype": str(machine.dtype).removeprefix("torch.")}
        return {"ui": {"text": [json.dumps(told)]}, "result": (model,)}


_ALL = (
    TestTextFails,
    TestMargin,
    TestMemoryRequired,
    TestConditioning,
    TestSaveTensor,
    TestLatent,
    TestBlockPatch,
    TestWatchBlocks,
    TestEmbedding,
    TestFillDevice,
    TestMoveText,
)
_FROZEN: list[bool] = []


def _quick_collections(prompt):
    """What is there before the first prompt is not searched for garbage again: that takes half a second each time."""
    if not _FROZEN:
        _FROZEN.append(True)
        gc.collect()
        gc.freeze()
    return prompt


PromptServer.instance.add_on_prompt_handler(_quick_collections)
NODE_CLASS_MAPPINGS = {cls.__name__: cls for cls in _ALL}
