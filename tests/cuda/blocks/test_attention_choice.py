"""The measured choice of an attention back end."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
import torch

from wanfit.blocks.attention_choice import EXACT, choose_attention
from wanfit.errors import InputError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda", 0)


def test_the_fastest_exact_back_end_is_taken_and_the_choice_is_remembered():
    choice = choose_attention("auto", DEVICE, torch.bfloat16, 128, 4096)
    ran = [m for m in choice.measured if not m.refusal]
    assert ran
    taken = next(m for m in ran if m.name == choice.name)
    assert taken.error <= EXACT
    assert taken.seconds == min(m.seconds for m in ran if m.error <= EXACT)
    assert choose_attention("auto", DEVICE, torch.bfloat16, 128, 4096) is choice
    q = torch.randn(1, 300, 2, 128, device=DEVICE).bfloat16()
    assert choice.backend(q, q, q).shape == q.shape


def test_a_back_end_by_name_is_that_one_or_is_refused_with_the_reason():
    assert choose_attention("efficient", DEVICE, torch.float16, 128, 1024).name == "efficient"
    with pytest.raises(InputError, match=r"attention flash does not work .* in torch\.float32"):
        choose_attention("flash", DEVICE, torch.float32, 128, 1024)


@pytest.mark.skipif(importlib.util.find_spec("comfy_kitchen") is None, reason="comfy-kitchen is not installed")
def test_kernels_of_8_bits_are_taken_by_name_only():
    tried = choose_attention("auto", DEVICE, torch.bfloat16, 128, 4096)
    assert tried.name != "comfy_kitchen"
    choice = choose_attention("comfy_kitchen", DEVICE, torch.bfloat16, 128, 4096)
    assert choice.name == "comfy_kitchen"
    assert EXACT < choice.measured[0].error < 5e-2


ORDER = """
import sys, torch
import torch.nn.functional as F
from wanfit.blocks.attention import sdpa
x = torch.ones(1, 64, 2, 64, dtype=torch.float16, device="cuda")
if sys.argv[1] == "ours":
    sdpa(x, x, x)
F.scaled_dot_product_attention(*(x.transpose(1, 2),) * 3)
print(torch._C._get_sdp_priority_order())
"""


def test_the_order_in_which_others_get_their_kernels_stays_pytorchs_own():
    """In processes of their own: PyTorch settles it in the first call."""
    orders = {
        subprocess.run([sys.executable, "-c", ORDER, way], check=True, capture_output=True, text=True).stdout
        for way in ("ours", "theirs")
    }
    assert len(orders) == 1, orders
