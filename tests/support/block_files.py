"""Checkpoints in memory, as the weight path sees them: names and stored weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from wanfit.quant import StoredWeight


def mixed_block(seed: int, width: int = 256) -> dict[str, StoredWeight]:
    """One tensor of each kind: fp8 with scales, packed GGUF, bf16, float32; sizes that are no multiple of 256."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    scale = torch.tensor(0.5 + seed)
    packed = torch.randint(0, 256, (24, width // 32 * 34), generator=generator, dtype=torch.uint8)
    packed.view(24, -1, 34)[..., :2] = torch.tensor([0.25], dtype=torch.float16).view(torch.uint8)
    return {
        "a.weight": StoredWeight(
            "f8_e4m3",
            (40, width),
            noise(40, width).to(torch.float8_e4m3fn),
            {"scale": scale, "input_scale": torch.tensor(1.0)},
            {"full_precision_matmul": True},
        ),
        "b.weight": StoredWeight("q8_0", (24, width), packed),
        "a.bias": StoredWeight("bf16", (41,), noise(41).to(torch.bfloat16)),
        "modulation": StoredWeight("f32", (1, 6, 7), noise(1, 6, 7)),
    }


class MemoryFile:
    """`StoredTensors` over weights in memory; counts what is loaded, and can run a hook before each load."""

    def __init__(self, blocks: Mapping[int, Mapping[str, StoredWeight]]) -> None:
        self._weights = {f"blocks.{i}.{key}": w for i, block in blocks.items() for key, w in block.items()}
        self._weights["head.head.weight"] = StoredWeight("f32", (2,), torch.zeros(2))
        self.loads = 0
        self.before_load = None

    @property
    def tensors(self) -> Mapping[str, object]:
        return self._weights

    def load(self, name: str) -> StoredWeight:
        if self.before_load is not None:
            self.before_load(name)
        self.loads += 1
        return self._weights[name]

    def forget(self, name: str) -> None:
        """Nothing is mapped."""


def numbered_file(count: int, width: int = 64, first: int = 0) -> MemoryFile:
    """Blocks whose one large tensor holds nothing but `first` + the block's number."""
    return MemoryFile(
        {
            i: {"a.weight": StoredWeight("f32", (4, width), torch.full((4, width), float(first + i)))}
            for i in range(count)
        }
    )
