"""Out of memory inside a forward: the run goes on with tighter settings and the same result."""

from __future__ import annotations

import dataclasses
import gc
import random
import weakref

import pytest
import torch
from block_files import MemoryFile
from torch import nn
from wan_blocks import block_weights, relative_error, shape_of, tiny_transformer

from wanfit.blocks import ForwardSettings, LeanBlock, sdpa
from wanfit.errors import BudgetError, RunError
from wanfit.memory.alarm import Alarm, Margins, Shortage
from wanfit.memory.host import available_bytes
from wanfit.offload import BlockStore, Ladder

CPU = torch.device("cpu")
OOM = torch.OutOfMemoryError


class Faults:
    """Attention that runs out of memory at chosen calls, in the middle of a block whose residual is in use."""

    def __init__(self) -> None:
        self.calls = 0
        self.at: set[int] = set()
        self.raised = 0

    def __call__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        call = self.calls
        self.calls += 1
        if call in self.at:
            self.raised += 1
            raise OOM("CUDA out of memory. Tried to allocate 1.00 GiB")
        return sdpa(q, k, v)


class Stack(nn.Module):
    """Four lean blocks over a store, run from a latent that the forward must leave alone."""

    def __init__(self, store: BlockStore, model: nn.Module, settings: ForwardSettings) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            LeanBlock(i, store.source(), shape_of(model), settings) for i in range(len(model.blocks))
        )

    def run(self, latent: torch.Tensor, inputs: dict[str, object], settings: ForwardSettings) -> torch.Tensor:
        tokens = latent.clone()
        for block in self.blocks:
            block.settings = settings
            tokens = block(tokens, **inputs)
        return tokens


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny_transformer(num_layers=4)


@pytest.fixture(scope="module")
def file(model: nn.Module) -> MemoryFile:
    return MemoryFile({i: block_weights(block) for i, block in enumerate(model.blocks)})


@pytest.fixture(scope="module")
def inputs(model: nn.Module) -> dict[str, object]:
    generator = torch.Generator().manual_seed(1)
    dim = shape_of(model).dim
    rotary = model.rope(torch.zeros(1, 16, 2, 8, 8))
    return {
        "encoder_hidden_states": torch.randn(1, 512, dim, generator=generator),
        "timestep_proj": torch.randn(1, 6, dim, generator=generator),
        "rotary_emb": rotary,
    }


@pytest.fixture(scope="module")
def latent(model: nn.Module) -> torch.Tensor:
    return torch.randn(1, 32, shape_of(model).dim, generator=torch.Generator().manual_seed(2))


def test_200_faults_at_random_places_leave_the_result_as_it_was(model, file, inputs, latent):
    """To the last bit while the chunk stays: what goes is resident blocks. float32, one thread."""
    chooser = random.Random(0)
    faults = Faults()
    settings = ForwardSettings(chunk_tokens=2**20, attention=faults)
    with BlockStore([file], CPU, policy="resident") as store:
        stack = Stack(store, model, settings)
        expected = stack.run(latent, inputs, settings)
        calls = faults.calls
    for _ in range(100):
        with BlockStore([file], CPU, policy="resident") as store:
            stack = Stack(store, model, settings)
            ladder = Ladder(settings, store)
            before = latent.clone()
            faults.at = {faults.calls + chooser.randrange(calls)}
            faults.at.add(max(faults.at) + 1 + chooser.randrange(calls))
            result = ladder.run(lambda rung: stack.run(latent, inputs, rung))  # noqa: B023
            assert torch.equal(result, expected)
            assert torch.equal(latent, before)
            assert ladder.settings == settings
            assert store.resident_count < 4
    assert faults.raised == 200


def test_smaller_chunks_change_the_result_by_rounding_only(model, file, inputs, latent):
    """float32, relative error 1e-6: matrix products over other numbers of rows may add in another order."""
    faults = Faults()
    settings = ForwardSettings(chunk_tokens=4096, attention=faults)
    with BlockStore([file], CPU, policy="stream") as store:
        stack = Stack(store, model, settings)
        expected = stack.run(latent, inputs, settings)
        ladder = Ladder(settings, store)
        faults.at = {faults.calls + 3, faults.calls + 6}
        result = ladder.run(lambda rung: stack.run(latent, inputs, rung))
        assert ladder.settings.chunk_tokens == 1024
        assert not ladder.settings.packed_attention
        assert relative_error(result, expected) < 1e-6
        assert faults.raised == 2


def test_the_order_of_the_rungs_and_the_end(model, file):
    told: list[str] = []

    def always(settings: ForwardSettings) -> None:
        raise OOM("CUDA out of memory. Tried to allocate 1.00 GiB")

    with BlockStore([file], CPU, policy="resident") as store:
        ladder = Ladder(ForwardSettings(chunk_tokens=2000), store, told.append)
        with pytest.raises(BudgetError, match="Tried to allocate") as caught:
            ladder.run(always)
    assert caught.value.code == "budget_exceeded"
    assert (
        told
        == ladder.steps
        == [
            "blocks kept on the device: 4 -> 2",
            "blocks kept on the device: 2 -> 1",
            "blocks kept on the device: 1 -> 0",
            "tokens in a chunk: 2000 -> 1000",
            "q, k and v: packed in 8 bits",
            "tokens in a chunk: 1000 -> 500",
            "tokens in a chunk: 500 -> 256",
        ]
    )


def test_the_rung_that_worked_is_kept_for_the_next_forward():
    ladder = Ladder(ForwardSettings(chunk_tokens=4096))
    failing = [True, True, False, False]

    def forward(settings: ForwardSettings) -> int:
        if failing.pop(0):
            raise OOM("CUDA out of memory")
        return settings.chunk_tokens

    assert ladder.run(forward) == 1024
    assert ladder.run(forward) == 1024


def test_tensors_of_the_failed_forward_are_free_before_the_next_try():
    kept: list[weakref.ref[torch.Tensor]] = []

    def forward(settings: ForwardSettings) -> None:
        if not kept:
            large = torch.zeros(1000)
            kept.append(weakref.ref(large))
            raise OOM("CUDA out of memory")
        assert kept[0]() is None

    gc.disable()
    try:
        Ladder(ForwardSettings(chunk_tokens=4096)).run(forward)
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, ValueError])
def test_other_errors_pass(error):
    def forward(settings: ForwardSettings) -> None:
        raise error

    ladder = Ladder(ForwardSettings(chunk_tokens=4096))
    with pytest.raises(error):
        ladder.run(forward)
    assert ladder.steps == []
    assert dataclasses.asdict(ladder.settings)["chunk_tokens"] == 4096


class Ringing(Alarm):
    """An alarm on the real counters of the host, with a margin that the test moves."""

    def __init__(self, margin: int) -> None:
        super().__init__(CPU, Margins(0, margin), interval_s=0)


def test_the_alarm_tightens_one_rung_at_each_block_and_the_result_stays(model, file, inputs, latent):
    """The margin is twice what is free: short, and not urgent. To the last bit where blocks go; here chunks do too."""
    settings = ForwardSettings(chunk_tokens=4096)
    with BlockStore([file], CPU, policy="resident", ram_budget=2**30) as store:
        stack = Stack(store, model, settings)
        expected = stack.run(latent, inputs, settings)
        kept = store.report.host_bytes
        assert kept > 0
        ladder = Ladder(settings, store, alarm=Ringing(2 * available_bytes()))
        tokens = latent.clone()
        seen = []
        for block in stack.blocks:
            block.settings = ladder.next_block()
            tokens = block(tokens, **inputs)
            seen.append((store.report.host_bytes, store.resident_count, block.settings.chunk_tokens))
    assert len(ladder.steps) == 4, "one rung a block"
    assert seen[0][0] < kept and [row[1] for row in seen] == [4, 2, 1, 0]
    assert "blocks kept in RAM" in ladder.steps[0] and "GiB of RAM are free" in ladder.steps[0]
    assert torch.equal(tokens, expected)


def test_packing_waits_until_it_is_urgent_and_the_end_is_said_once_or_stops():
    ladder = Ladder(ForwardSettings(chunk_tokens=2048), alarm=Ringing(2 * available_bytes()))
    for _ in range(4):
        ladder.next_block()
    assert ladder.settings.chunk_tokens == 1024 and not ladder.settings.packed_attention
    assert [step.split(" (")[0] for step in ladder.steps] == [
        "tokens in a chunk: 2048 -> 1024",
        "nothing is left to give up",
    ]
    urgent = Ladder(ForwardSettings(chunk_tokens=2048), alarm=Ringing(2**50))
    with pytest.raises(RunError, match="GiB of RAM are free") as caught:
        for _ in range(10):
            urgent.next_block()
    assert caught.value.code == "memory_low"
    assert urgent.settings.chunk_tokens == 256 and urgent.settings.packed_attention


def test_blocks_that_lost_their_place_in_ram_are_read_again(file, model, inputs, latent):
    settings = ForwardSettings(chunk_tokens=4096)
    with BlockStore([file], CPU, policy="stream", ram_budget=2**30) as store:
        stack = Stack(store, model, settings)
        expected = stack.run(latent, inputs, settings)
        while store.shrink_host():
            assert torch.equal(stack.run(latent, inputs, settings), expected)
        assert store.report.host_bytes <= 2 * store.report.slot_bytes, "the ring alone"
        assert torch.equal(stack.run(latent, inputs, settings), expected)


def test_on_a_device_others_are_asked_first_then_a_rung_is_taken():
    """By shortages as a card reports them: the same ladder, and each look finds VRAM short."""
    told: list[str] = []

    class Device(Ringing):
        def check(self):
            return (Shortage("VRAM", 200 * 2**20, 256 * 2**20),)

    ladder = Ladder(
        ForwardSettings(chunk_tokens=4096),
        on_step=told.append,
        alarm=Device(0),
        make_room=lambda s: told.append(s.kind),
    )
    seen = [ladder.next_block().chunk_tokens for _ in range(4)]
    assert seen == [4096, 2048, 2048, 1024]
    assert [line.split(" (")[0] for line in told] == [
        "VRAM", "tokens in a chunk: 4096 -> 2048", "VRAM", "tokens in a chunk: 2048 -> 1024",
    ]  # fmt: skip
