"""ComfyUI's own VAE, untiled and tiled (`VAEDecodeTiled`), over the weights of a diffusers VAE, in its own process.

Started by `vae.py --comfy TREE` with the Python of that tree. ComfyUI reads the VAE of Wan 2.2 at its real width only.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def comfy_tiled(
    tree: Path, variant: str, vae: Any, latents: torch.Tensor, *, device: str, tile: int, overlap: int
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Its tiled decode, (B, 3, frames, H, W) in -1..1 on the host, and figures; `max_abs_diff`: to its own untiled.

    Args:
        tile, overlap: pixels, as the node takes them; 64 frames and 8 of overlap in time, the node's defaults.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    from comfyui_server import python_for

    from wanfit.checkpoint.names import to_diffusers_vae
    from wanfit.checkpoint.structure import vae_tensors

    widths = {"base_dim": vae.config.base_dim, "decoder_base_dim": vae.config.decoder_base_dim or vae.config.base_dim}
    names = vae_tensors(variant, **widths, latent_channels=vae.config.z_dim, pixel_channels=vae.config.in_channels)
    state = vae.state_dict()
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        save_file({name: state[to_diffusers_vae(name, variant)].cpu().contiguous() for name in names}, place / "vae")
        save_file({"latents": latents.cpu().contiguous()}, place / "latents")
        numbers = ("--tile", str(tile), "--overlap", str(overlap), "--device", device)
        done = subprocess.run(
            [str(python_for(tree)), __file__, "--tree", str(tree), "--folder", folder, *numbers],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        video = load_file(place / "video")["video"]
    return video, json.loads(done.stdout.strip().rpartition("\n")[2])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tree", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--tile", type=int, required=True)
    parser.add_argument("--overlap", type=int, required=True)
    parser.add_argument("--device", required=True)
    given = parser.parse_args()
    sys.argv = ["main.py", *(["--cpu"] if given.device == "cpu" else [])]
    sys.path.insert(0, given.tree)
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd

    from nodes import VAEDecodeTiled

    weights = load_file(given.folder / "vae")
    latents = {"samples": load_file(given.folder / "latents")["latents"].float()}
    vae = comfy.sd.VAE(sd=weights, dtype=next(iter(weights.values())).dtype)
    cuda = given.device == "cuda"
    with torch.inference_mode():
        untiled = vae.decode(latents["samples"]).float().cpu()
        node = VAEDecodeTiled()
        node.decode(vae, {"samples": latents["samples"][:, :, :2]}, given.tile, given.overlap)
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        (tiled,) = node.decode(vae, latents, given.tile, given.overlap)
        tiled = tiled.float().cpu()
        seconds = time.perf_counter() - started
    untiled = untiled.reshape(tiled.shape)
    figures = {
        "time_s": round(seconds, 3),
        "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "max_abs_diff": 2 * (tiled - untiled).abs().max().item(),
        "mean_abs_diff": 2 * (tiled - untiled).abs().mean().item(),
    }
    save_file({"video": (tiled.movedim(-1, 0)[None] * 2 - 1).contiguous()}, given.folder / "video")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
