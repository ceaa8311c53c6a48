"""A base directory for a real ComfyUI: this pack, tiny models, and the shipped workflows set to them.

    python scripts/comfyui_demo.py BASE [--wide-vae]

`scripts/dev.py comfyui` runs it before it starts the server.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from comfyui_server import PACK, prepare_base

from wanfit.tiny.gguf_layout import write_gguf
from wanfit.tiny.layouts import write_comfy_scaled, write_plain
from wanfit.tiny.models import tiny_transformer, tiny_vae
from wanfit.tiny.text import TinyShape, make_text
from wanfit.tiny.text import write_gguf as write_text_gguf

TEXT = "umt5-xxl-encoder-Q8_0.gguf"
_LATENTS = ("WanImageToVideo", "WanFirstLastFrameToVideo", "EmptyHunyuanLatentVideo")
SMALL = {kind: [64, 64, 5, 1] for kind in _LATENTS}


def write_models(models: Path, *, wide_vae: bool) -> None:
    """Tiny models under the names that the workflows use; the text encoder under a name of its own.

    Args:
        wide_vae: the VAE in its real width, the only one that cores before 0.4 know; slow on a CPU.
    """
    experts = models / "diffusion_models"
    for number, kind in enumerate(("i2v", "t2v")):
        weights = tiny_transformer(f"{kind}-a14b", seed=number)
        for side in ("high", "low"):
            write_comfy_scaled(experts / f"wan2.2_{kind}_{side}_noise_14B_fp8_scaled.safetensors", weights)
    for side in ("High", "Low"):
        write_gguf(experts / f"Wan2.2-I2V-A14B-{side}Noise-Q4_K_M.gguf", tiny_transformer(seed=3), "Q4_K_M")
    write_text_gguf(make_text(TinyShape(d_kv=1, num_heads=64, num_layers=24), seed=4), models / "text_encoders", "Q8_0")
    width = 96 if wide_vae else 16
    write_plain(models / "vae" / "wan_2.1_vae.safetensors", tiny_vae(base_dim=width), dtype=torch.bfloat16)


def write_workflows(folder: Path) -> None:
    """The shipped workflows with the tiny text encoder and tiny sizes; TI2V-5B needs its real VAE and is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted((PACK / "workflows").glob("*.json")):
        if "5b" in path.stem or "4step" in path.stem:
            continue
        workflow = json.loads(path.read_text(encoding="utf-8"))
        for node in workflow["nodes"]:
            if node["type"] == "WanFitTextEncoderLoader":
                node["widgets_values"][0] = TEXT
            node["widgets_values"] = SMALL.get(node["type"], node["widgets_values"])
            node["properties"].pop("models", None)
        (folder / f"tiny_{path.name}").write_text(json.dumps(workflow, ensure_ascii=False), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--wide-vae", action="store_true")
    options = parser.parse_args()
    prepare_base(options.base, {"wanfit": PACK})
    if not (options.base / "models" / "text_encoders" / TEXT).exists():
        write_models(options.base / "models", wide_vae=options.wide_vae)
    write_workflows(options.base / "user" / "default" / "workflows")
    shutil.copyfile(PACK / "assets" / "boat.jpg", options.base / "input" / "example.png")


if __name__ == "__main__":
    main()
