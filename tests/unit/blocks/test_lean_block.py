"""LeanBlock's dealings with its source, its settings and the interrupt hook."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from wan_blocks import TEXT_TOKENS, make_lean, tiny_transformer

from wanfit.blocks import ForwardSettings, sdpa
from wanfit.errors import InputError


class Stopped(Exception):
    pass


class AttentionThatFails:
    """Real attention, until the given call."""

    def __init__(self, at: int) -> None:
        self.calls = 0
        self.at = at

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.at:
            raise torch.OutOfMemoryError("no memory")
        return sdpa(q, k, v)


def inputs() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 16, 2, 8, 8),
        "timestep": torch.tensor([500.0]),
        "encoder_hidden_states": torch.randn(1, TEXT_TOKENS, 32),
    }


def test_each_block_is_onloaded_once_and_released_before_the_next() -> None:
    model = tiny_transformer()
    source = make_lean(model, ForwardSettings(5))
    for _ in range(2):
        source.log.clear()
        model(**inputs())
        assert source.log == [("onload", 0), ("release", 0), ("onload", 1), ("release", 1)]


def test_weights_are_released_when_a_forward_fails_and_the_next_forward_is_right() -> None:
    model = tiny_transformer()
    with torch.no_grad():
        expected = model(**inputs()).sample
        source = make_lean(model, ForwardSettings(16))
        failing = ForwardSettings(16, attention=AttentionThatFails(at=6))
        for block in model.blocks:
            block.settings = failing
        with pytest.raises(torch.OutOfMemoryError):
            model(**inputs())
        assert source.log == [("onload", 0), ("release", 0), ("onload", 1), ("release", 1)]
        for block in model.blocks:
            block.settings = dataclasses.replace(failing, chunk_tokens=8, attention=sdpa)
        actual = model(**inputs()).sample
    assert torch.allclose(actual, expected, rtol=0, atol=1e-5)


def test_the_interrupt_hook_stops_between_blocks_and_nothing_stays_onloaded() -> None:
    calls = []

    def stop_at_the_second() -> None:
        calls.append(1)
        if len(calls) == 2:
            raise Stopped

    model = tiny_transformer()
    source = make_lean(model, ForwardSettings(16, check_interrupt=stop_at_the_second))
    with pytest.raises(Stopped):
        model(**inputs())
    assert source.log == [("onload", 0), ("release", 0)]


def test_a_lean_block_owns_no_tensors() -> None:
    model = tiny_transformer()
    make_lean(model, ForwardSettings(16))
    assert not model.blocks.state_dict()


@pytest.mark.parametrize("chunk", [0, -4])
def test_chunks_of_no_tokens_are_refused(chunk: int) -> None:
    with pytest.raises(InputError, match=r"number_invalid.*chunk_tokens is"):
        ForwardSettings(chunk)
