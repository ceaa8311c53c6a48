"""The alarm on a card: memory that another process really takes costs a rung, not the run."""

from __future__ import annotations

import time

import pytest
import torch
from block_files import MemoryFile

from wanfit.blocks import ForwardSettings
from wanfit.errors import RunError
from wanfit.memory.alarm import Alarm, Margins
from wanfit.offload import BlockStore, Ladder
from wanfit.quant import StoredWeight

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda", 0)
MIB = 2**20
WIDTH, COUNT = 4096, 8


@pytest.fixture
def free() -> int:
    torch.zeros(1, device=DEVICE)
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(DEVICE)[0]


def test_memory_of_the_device_counts_whoever_has_it(free):
    alarm = Alarm(DEVICE, Margins(free - 256 * MIB, 0), interval_s=0)
    assert alarm.check() == ()
    held = torch.empty(512 * MIB, dtype=torch.uint8, device=DEVICE)
    (shortage,) = alarm.check()
    assert shortage.kind == "VRAM" and not shortage.urgent
    del held
    torch.cuda.empty_cache()
    assert alarm.check() == ()


def test_it_does_not_wait_for_the_device():
    alarm = Alarm(DEVICE, interval_s=0)
    x = torch.randn(8192, 8192, device=DEVICE)
    x @ x
    torch.cuda.synchronize()
    for _ in range(40):
        x @ x
    start = time.perf_counter()
    for _ in range(20):
        alarm.check()
    asked = time.perf_counter() - start
    torch.cuda.synchronize()
    assert asked < 0.2 * (time.perf_counter() - start), "the device had work for much longer than the questions took"


def test_a_rung_at_the_next_block_and_the_same_result(free):
    """Margins are set so that what stays on the card is too much: half of the blocks go, then half of the rest."""
    generator = torch.Generator().manual_seed(0)
    blocks = {
        i: {
            "a.weight": StoredWeight("f32", (WIDTH, WIDTH), torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5)
        }
        for i in range(COUNT)
    }
    slot = WIDTH * WIDTH * 4
    x = torch.randn(512, WIDTH, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)

    def forward(store: BlockStore, ladder: Ladder) -> torch.Tensor:
        out = x
        for index in range(COUNT):
            ladder.next_block()
            with store.source().onload(index) as weights:
                out = torch.tanh(out @ weights["a.weight"].data)
        return out

    with BlockStore([MemoryFile(blocks)], DEVICE, policy="resident", ram_budget=COUNT * slot) as store:
        quiet = Ladder(ForwardSettings(4096), store)
        expected = forward(store, quiet)
        taken = free - torch.cuda.mem_get_info(DEVICE)[0]
        assert taken >= COUNT * slot
        alarm = Alarm(DEVICE, Margins(free - 5 * slot, 0), interval_s=0)
        ladder = Ladder(ForwardSettings(4096), store, alarm=alarm)
        assert torch.equal(forward(store, ladder), expected)
        assert torch.equal(forward(store, ladder), expected)
        print(ladder.steps)
        assert ladder.steps and ladder.steps[0].startswith("blocks kept on the device: 8 -> 4")
        assert free - torch.cuda.mem_get_info(DEVICE)[0] < taken - 2 * slot


def test_the_end_of_the_ladder(free):
    ladder = Ladder(ForwardSettings(512), alarm=Alarm(DEVICE, Margins(8 * free, 0), interval_s=0))
    with pytest.raises(RunError, match="GiB of VRAM are free"):
        for _ in range(20):
            ladder.next_block()
