"""Run by a ComfyUI tree's Python: its own Wan VAE modules against the engine over the same modules.

    python comfy_vae_case.py TREE SRC

Prints one JSON line with the largest differences.
"""

import json
import sys

tree, src = sys.argv[1:3]
sys.argv = ["case", "--cpu"]
sys.path[:0] = [tree, src]

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import torch  # noqa: E402
from comfy.ldm.wan import vae as vae21  # noqa: E402
from comfy.ldm.wan import vae2_2 as vae22  # noqa: E402

from wanfit.vae import HostFrames, decode, encode, plan_decode, plan_encode  # noqa: E402

torch.set_num_threads(1)
topology = {"z_dim": 4, "dim_mult": [1, 2, 4, 4], "num_res_blocks": 2, "temperal_downsample": [False, True, True]}
found = {}
for name, make, factor in (
    ("vae-2.1", lambda: vae21.WanVAE(dim=8, **topology), 8),
    ("vae-2.2", lambda: vae22.WanVAE(dim=8, dec_dim=8, **topology), 16),
):
    torch.manual_seed(0)
    vae = make().eval()
    for key, parameter in vae.named_parameters():
        noise = torch.randn_like(parameter)
        if "gamma" in key:
            parameter.data = 1 + 0.2 * noise
        else:
            parameter.data = noise * (0.1 if key.endswith("bias") else parameter[0].numel() ** -0.5)
    latents = torch.randn(1, 4, 3, 6, 7)
    video = torch.rand(1, 3, 5, 15 * factor, 16 * factor) * 2 - 1
    with torch.inference_mode():
        expected, mean = vae.decode(latents).clamp(-1, 1), vae.encode(video)
        sink = HostFrames()
        plan = plan_decode(vae, latents.shape, dtype=torch.float32, grid=(2, 3))
        report = decode(vae, latents, plan, sink)
        encoded = encode(vae, video, plan_encode(vae, video.shape, dtype=torch.float32, grid=(2, 2)))
    found[name] = {
        "tiles": [report.tiles, encoded.report.tiles],
        "range": expected.abs().max().item(),
        "decode": (sink.video - expected).abs().max().item(),
        "encode": (encoded.mean - mean).abs().max().item(),
    }
print(json.dumps(found))
