"""Attention by name, as far as it can be told without a GPU; `tests/cuda/blocks` measures."""

from __future__ import annotations

import pytest
import torch

from wanfit.blocks import ATTENTION, choose_attention, sdpa
from wanfit.errors import InputError

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_the_cpu_takes_pytorchs_kernel_and_measures_nothing(name: str):
    choice = choose_attention(name, CPU, torch.float32, 128, 32760)
    assert (choice.name, choice.backend, choice.measured, choice.seconds) == ("sdpa", sdpa, (), 0.0)


@pytest.mark.parametrize("name", [name for name in ATTENTION if name not in ("auto", "sdpa")])
def test_what_needs_a_card_is_refused_on_the_cpu(name: str):
    with pytest.raises(InputError, match=f"attention {name} needs a CUDA device") as caught:
        choose_attention(name, CPU, torch.float32, 128, 32760)
    assert caught.value.code == "attention_unavailable"


def test_an_unknown_name_is_answered_with_the_known_ones():
    with pytest.raises(InputError, match=r"attention is 'flash3'.*auto, sdpa, cudnn"):
        choose_attention("flash3", CPU, torch.float32, 128, 32760)
