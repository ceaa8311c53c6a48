"""The residual between blocks in float16 where the forward computes in bfloat16."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from wan_blocks import relative_error

from wanfit.blocks import ForwardSettings
from wanfit.checkpoint import Checkpoint, open_checkpoint
from wanfit.offload import Ladder, MappedBlocks
from wanfit.pipeline.transformer import LeanTransformer, build_transformer
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.models import tiny_transformer

CPU = torch.device("cpu")
LAYERS = 8


@pytest.fixture(scope="module")
def weights() -> dict[str, torch.Tensor]:
    """Exact in bfloat16, so that all runs below have the same weights."""
    return {name: tensor.bfloat16().float() for name, tensor in tiny_transformer("t2v-a14b", num_layers=LAYERS).items()}


def written(path: Path, weights: dict[str, torch.Tensor]) -> Checkpoint:
    return open_checkpoint(write_plain(path / "wan2.2_t2v_high_noise.safetensors", weights, dtype=torch.bfloat16))


class Run:
    """One forward from the same inputs."""

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, *, wide: bool = True) -> None:
        self.ladder = Ladder(ForwardSettings(64))
        model: LeanTransformer = build_transformer(checkpoint, MappedBlocks(checkpoint, CPU), self.ladder, dtype)
        model.load_rest(checkpoint, CPU, dtype)
        model._wide_residual = wide
        seen: list[torch.dtype] = []
        for block in model.blocks:
            block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
        torch.manual_seed(3)
        latents, text = torch.randn(1, 16, 2, 8, 12), torch.randn(1, 512, 4096)
        with torch.no_grad():
            self.result = model(latents.to(dtype), torch.tensor([500.0]), text.to(dtype), return_dict=False)[0]
        self.residuals = seen


def test_three_bits_more_halve_the_error(tmp_path: Path, weights: dict[str, torch.Tensor]):
    """Against float32 on the same weights. What is left is what linears and attention round their inputs to."""
    with written(tmp_path, weights) as checkpoint:
        exact = Run(checkpoint, torch.float32)
        wide, narrow = (Run(checkpoint, torch.bfloat16, wide=wide) for wide in (True, False))
    assert set(exact.residuals) == {torch.float32}
    assert set(wide.residuals) == {torch.float16} and set(narrow.residuals) == {torch.bfloat16}
    assert wide.result.dtype == torch.bfloat16
    errors = [relative_error(run.result, exact.result) for run in (wide, narrow)]
    print(f"\nresidual in float16 {errors[0]:.2e}, in bfloat16 {errors[1]:.2e}")
    assert errors[0] < 0.6 * errors[1]


def test_beyond_65504_it_goes_on_in_bfloat16_and_says_so(tmp_path: Path, weights: dict[str, torch.Tensor]):
    large = weights | {"blocks.5.ffn.2.bias": torch.full_like(weights["blocks.5.ffn.2.bias"], 2.0**20)}
    with written(tmp_path, large) as checkpoint:
        run, narrow = (Run(checkpoint, torch.bfloat16, wide=wide) for wide in (True, False))
    assert run.residuals == [torch.float16] * LAYERS + [torch.bfloat16] * LAYERS
    assert torch.equal(run.result, narrow.result) and bool(run.result.isfinite().all())
    assert len(run.ladder.steps) == 1 and "float16" in run.ladder.steps[0]


def test_a_damaged_weight_is_not_taken_for_that(tmp_path: Path, weights: dict[str, torch.Tensor]):
    damaged = weights | {"blocks.5.ffn.2.bias": torch.full_like(weights["blocks.5.ffn.2.bias"], torch.nan)}
    with written(tmp_path, damaged) as checkpoint:
        run = Run(checkpoint, torch.bfloat16)
    assert not run.ladder.steps
    assert not bool(run.result.isfinite().any())
