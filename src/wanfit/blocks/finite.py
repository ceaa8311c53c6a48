"""NaN and infinity stop a run where they arise, with the likely cause."""

from __future__ import annotations

import torch

from ..errors import WanFitError


def require_finite(
    values: torch.Tensor, what: str, *, dtype: torch.dtype, patched: bool, given: torch.Tensor | None = None
) -> None:
    """Once a forward or a step: waits for the device.

    Args:
        what: `the latents became NaN or infinite in step 3`: how the error begins.
        dtype: compute dtype of the model. patched: it has LoRAs.
        given: what `values` were made from; when it is not finite either, that is said instead of a cause here.

    Raises:
        WanFitError: nan_in_latents.
    """
    if bool(torch.isfinite(values).all()):
        return
    if given is not None and not bool(torch.isfinite(given).all()):
        raise WanFitError(
            "nan_in_latents",
            "denoise",
            f"{what}; what the model was given held NaN or infinity already",
            "Look at what comes before it: the latent or image, the VAE that encoded it, the sampler's settings",
        )
    causes = ["a damaged or mislabelled model file: compare its size and hash with where it came from"]
    if patched:
        causes.insert(0, "a LoRA, by its strength or because it is for another model: run without it")
    if dtype == torch.float16:
        causes.insert(0, "float16, which ends at 65504: compute in bfloat16 or float32")
    raise WanFitError(
        "nan_in_latents", "denoise", f"{what}, computed in {str(dtype).removeprefix('torch.')}", _likely(causes)
    )


def _likely(causes: list[str]) -> str:
    first, *others = causes
    return f"Most likely {first}" + "".join(f". If not: {other}" for other in others)
