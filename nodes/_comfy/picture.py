"""A chart as ComfyUI's IMAGE."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from PIL import Image


def image_of(draw: Callable[[Path], None]) -> torch.Tensor:
    """The PNG that `draw` writes to the path that it is given: (1, H, W, 3), float32 in 0 to 1."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "chart.png"
        draw(path)
        pixels = np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) / 255
    return torch.from_numpy(pixels)[None]
