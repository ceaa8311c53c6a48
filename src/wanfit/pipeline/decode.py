"""temporary"""

import torch


def decode_to(vae, latents, writer):
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1)
    std = torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1)
    with torch.no_grad():
        v = vae.decode(latents.to(vae.dtype) * std + mean).sample
    writer.write(((v[0].permute(1, 2, 3, 0).float() + 1) * 127.5).clamp(0, 255).round().byte())
