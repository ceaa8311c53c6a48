"""The weight path on a GPU: same result, ordered peaks, copies beside the computation, nothing left behind."""

from __future__ import annotations

import gc
import threading

import pytest
import torch
from block_files import MemoryFile, numbered_file

from wanfit.offload import BlockStore
from wanfit.offload.host_memory import HostBuffer
from wanfit.quant import StoredWeight

Event = torch.cuda.Event

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda", 0)
WIDTH = 2048
COUNT = 12
BLOCK_BYTES = WIDTH * WIDTH * 4


@pytest.fixture(scope="module")
def file() -> MemoryFile:
    generator = torch.Generator().manual_seed(0)
    blocks = {}
    for index in range(COUNT):
        data = torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5
        blocks[index] = {"a.weight": StoredWeight("f32", (WIDTH, WIDTH), data)}
    return MemoryFile(blocks)


def forward(store: BlockStore, rows: int = 512, work: int = 1) -> torch.Tensor:
    x = torch.randn(rows, WIDTH, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    for index in range(COUNT):
        with store.source().onload(index) as weights:
            for _ in range(work):
                x = torch.tanh(x @ weights["a.weight"].data)
    return x


def test_every_policy_gives_the_same_and_peaks_are_ordered(file: MemoryFile):
    results, peaks = {}, {}
    for policy, budget in (("stream", None), ("auto", 7 * BLOCK_BYTES), ("resident", None)):
        torch.cuda.empty_cache()
        with BlockStore([file], DEVICE, policy=policy, vram_budget=budget, ram_budget=4 * BLOCK_BYTES) as store:
            for _ in range(3):
                forward(store, rows=32)
                torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            results[policy] = forward(store)
            torch.cuda.synchronize()
            peaks[policy] = torch.cuda.max_memory_allocated()
    assert torch.equal(results["stream"], results["resident"])
    assert torch.equal(results["auto"], results["resident"])
    # 32 rows a block are over long before the next block is there, so auto keeps what its budget holds
    assert peaks["stream"] < peaks["auto"] < peaks["resident"]


@pytest.mark.parametrize("ram_blocks", [0, 4, COUNT])
def test_a_block_is_copied_while_another_is_computed(file: MemoryFile, ram_blocks: int):
    """By events: most of the time of most copies lies within the computation of one block."""

    def shared(copy: tuple[int, Event, Event], block: tuple[Event, Event]) -> float:
        _, begin, end = copy
        entered, left = block
        start = max(0.0, begin.elapsed_time(entered))
        stop = min(begin.elapsed_time(end), begin.elapsed_time(left))
        return max(0.0, stop - start) / begin.elapsed_time(end)

    with BlockStore([file], DEVICE, policy="stream", ram_budget=ram_blocks * BLOCK_BYTES) as store:
        for _ in range(2):
            forward(store, rows=32768, work=12)
        torch.cuda.synchronize()
        copies = list(store._lane._copies)[-COUNT:]
        blocks = list(store._lane._blocks)[-COUNT:]
        shares = [max(shared(copy, block) for block in blocks) for copy in copies]
        assert sum(share > 0.8 for share in shares) >= COUNT // 2, shares


def test_blocks_stay_right_when_the_host_runs_far_ahead():
    """Many short blocks, not waited for: a slot that was overwritten too early would show in the sums."""
    count = 24
    sums = []
    with BlockStore([numbered_file(count)], DEVICE, policy="stream", ram_budget=0) as store:
        for _ in range(20):
            for index in range(count):
                with store.source().onload(index) as weights:
                    sums.append(weights["a.weight"].data.mean())
    values = torch.stack(sums).cpu().view(20, count)
    assert torch.equal(values, torch.arange(count, dtype=torch.float32).expand(20, count))


def test_two_experts_keep_the_device_memory_flat(file: MemoryFile):
    with BlockStore([file, file], DEVICE, policy="stream", ram_budget=2 * COUNT * BLOCK_BYTES) as store:
        held = []
        for _ in range(2):
            for expert in (0, 1):
                for index in range(COUNT):
                    with store.source(expert).onload(index):
                        pass
                torch.cuda.synchronize()
                held.append(torch.cuda.memory_allocated())
        assert len(set(held)) == 1


def test_ten_runs_are_flat_and_closing_gives_everything_back(file: MemoryFile):
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    held = []
    for _ in range(10):
        with BlockStore([file], DEVICE, policy="auto", vram_budget=5 * BLOCK_BYTES, ram_budget=BLOCK_BYTES) as store:
            forward(store, rows=64)
            forward(store, rows=64)
        torch.cuda.synchronize()
        held.append(torch.cuda.memory_allocated())
    assert held[-1] <= before + 2**20 and len(set(held)) == 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("wanfit-read")]


def test_host_buffers_are_pinned_in_place_and_released():
    buffer = HostBuffer(2**20, DEVICE)
    assert buffer.pinned
    assert buffer.data.is_pinned()
    buffer.close()
    again = HostBuffer(2**20, DEVICE)
    assert again.pinned


def test_a_refused_registration_leaves_a_pageable_buffer_and_no_pending_error(monkeypatch, file: MemoryFile):
    from wanfit.offload import host_memory

    real = torch.cuda.cudart()

    class Refusing:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            return int(real.cudaHostRegister(0, nbytes, flags))  # an address that cannot be registered

    monkeypatch.setattr(host_memory, "_runtime", Refusing)
    with BlockStore([file], DEVICE, policy="stream", ram_budget=COUNT * BLOCK_BYTES) as store:
        result = forward(store)
        assert torch.equal(forward(store), result)
        assert store.report.pinned_bytes == 0
        assert any("pinned" in notice for notice in store.report.notices)
    monkeypatch.undo()
    with BlockStore([file], DEVICE, policy="stream", ram_budget=COUNT * BLOCK_BYTES) as store:
        assert torch.equal(forward(store), result)
