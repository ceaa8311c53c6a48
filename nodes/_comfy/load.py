"""What the loader node does."""

from __future__ import annotations

from typing import Any

from ...src.wanfit.checkpoint import check_pair, open_checkpoint
from . import folders, model
from .no_model import NoModel


def experts(high: str, low: str, weight_dtype: str) -> tuple[Any, Any, str]:
    """(MODEL high, MODEL low or a `NoModel`, one line about each).

    Raises: as `open_checkpoint`, `check_pair`, `load_model`.
    """
    paths = [folders.find("diffusion_models", high, "transformer")]
    if low != folders.NONE:
        paths.append(folders.find("diffusion_models", low, "transformer_2"))
    checkpoints = [open_checkpoint(path) for path in paths]
    if len(checkpoints) == 2:
        check_pair(checkpoints[0].identity, checkpoints[1].identity)
    models = model.load_models(checkpoints, to_fp8=weight_dtype == "fp8_e4m3fn")
    info = "\n".join(f"{c.path.name}: {c.identity.describe()}" for c in checkpoints)
    missing = NoModel("<model_low> of WanFitLoader is none", "Choose the low-noise file there, or use model_high")
    return models[0], models[1] if len(models) == 2 else missing, info
