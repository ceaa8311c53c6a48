"""The measured choice of an attention back end."""

from __future__ import annotations

import pytest
import torch

from wanfit.blocks.attention_choice import EXACT, choose_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_the_fastest_exact_back_end_is_taken_and_the_choice_is_remembered():
    device = torch.device("cuda", 0)
    choice = choose_attention(device, torch.bfloat16, 128, 4096)
    ran = [m for m in choice.measured if not m.refusal]
    assert ran
    taken = next(m for m in ran if m.name == choice.name)
    assert taken.error <= EXACT
    assert taken.seconds == min(m.seconds for m in ran if m.error <= EXACT)
    assert choose_attention(device, torch.bfloat16, 128, 4096) is choice
    q = torch.randn(1, 300, 2, 128, device=device).bfloat16()
    assert choice.backend(q, q, q).shape == q.shape
