"""NaN and infinity are named with their likely cause."""

from __future__ import annotations

import pytest
import torch

from wanfit.blocks import require_finite
from wanfit.errors import WanFitError

GOOD = torch.zeros(3)
WHAT = "the latents became NaN or infinite in step 3"


def test_finite_values_pass():
    require_finite(GOOD, WHAT, dtype=torch.float16, patched=True)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("dtype", "patched", "order"),
    [
        (torch.float16, True, ["65504", "LoRA", "file"]),
        (torch.float16, False, ["65504", "file"]),
        (torch.bfloat16, True, ["LoRA", "file"]),
        (torch.float32, False, ["file"]),
    ],
)
def test_causes_come_in_the_order_of_their_likelihood(bad: float, dtype: torch.dtype, patched: bool, order: list[str]):
    with pytest.raises(WanFitError) as caught:
        require_finite(torch.tensor([0.0, bad]), WHAT, dtype=dtype, patched=patched, given=GOOD)
    error = caught.value
    assert error.code == "nan_in_latents" and error.what.startswith(WHAT)
    places = [error.change.find(word) for word in order]
    assert -1 not in places and places == sorted(places)
    assert ("LoRA" in error.change) == patched


def test_what_was_not_finite_before_is_no_fault_of_the_model():
    with pytest.raises(WanFitError, match="was given held NaN") as caught:
        bad = torch.tensor([float("nan")])
        require_finite(bad, WHAT, dtype=torch.float16, patched=True, given=bad)
    assert "65504" not in caught.value.change
