"""The command line's words for the engine's inputs, used when an error is printed."""

from __future__ import annotations

FLAGS = {
    "prompt": "--prompt",
    "negative_prompt": "--negative",
    "image": "--image",
    "last_image": "--last-image",
    "width": "--width",
    "height": "--height",
    "num_frames": "--frames",
    "steps": "--steps",
    "seed": "--seed",
    "sampler": "--sampler",
    "shift": "--shift",
    "boundary_ratio": "--boundary",
    "guidance_scale": "--guidance",
    "guidance_scale_2": "--guidance-low",
    "fps": "--fps",
    "out": "--out",
    "report": "--report",
    "chart": "--chart",
    "model": "--model",
    "high": "--high",
    "low": "--low",
    "text_encoder": "--text-encoder",
    "vae": "--vae",
    "tokenizer": "--tokenizer",
    "device": "--device",
    "dtype": "--dtype",
    "vae_dtype": "--vae-dtype",
    "chunk_tokens": "--chunk-tokens",
}
