"""The weight path on the CPU, where the same steps run with plain copies."""

from __future__ import annotations

import gc
import itertools
import threading
import time
import weakref

import pytest
import torch
from block_files import MemoryFile, mixed_block, numbered_file

from wanfit.errors import BudgetError
from wanfit.offload import BlockStore
from wanfit.offload.lane import Speed
from wanfit.offload.store import BlockSource
from wanfit.quant import StoredWeight, dequantize

CPU = torch.device("cpu")


def readers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("wanfit-read")]


def one_pass(source: BlockSource, count: int, first: int = 0) -> None:
    """Ask for all blocks in order and check that each is the right one, to the last byte."""
    for index in range(count):
        with source.onload(index) as weights:
            assert torch.equal(weights["a.weight"].data, torch.full((4, 64), float(first + index)))


@pytest.fixture
def block_bytes() -> int:
    return 4 * 64 * 4  # float32, a multiple of the alignment


@pytest.mark.parametrize("ram_blocks", [0, 2, 5, 9, 10, 100])
@pytest.mark.parametrize("policy", ["stream", "auto", "resident"])
def test_every_policy_and_budget_gives_the_blocks(policy, ram_blocks: int, block_bytes: int):
    with BlockStore([numbered_file(10)], CPU, policy=policy, ram_budget=ram_blocks * block_bytes) as store:
        for _ in range(3):
            one_pass(store.source(), 10)


def test_stored_bytes_travel_with_their_scales():
    blocks = {i: mixed_block(i) for i in range(3)}
    with BlockStore([MemoryFile(blocks)], CPU, policy="stream") as store:
        for _ in range(2):
            for index, block in blocks.items():
                with store.source().onload(index) as weights:
                    for key, weight in block.items():
                        assert weights[key].format == weight.format
                        assert torch.equal(dequantize(weights[key], torch.float32), dequantize(weight, torch.float32))


def test_stream_uses_the_two_slots_in_turn_and_prefetches_the_next_block(block_bytes: int):
    with BlockStore([numbered_file(6)], CPU, policy="stream", ram_budget=100 * block_bytes) as store:
        one_pass(store.source(), 6)
        one_pass(store.source(), 6)
        second = store.trace.of("enter", "exit", "upload")[-18:]
        assert store.report.device_bytes == 2 * block_bytes
    entered = [step for step in second if step.action == "enter"]
    assert [step.key[1] for step in entered] == list(range(6))
    assert [step.place for step in entered] in (["slot 0", "slot 1"] * 3, ["slot 1", "slot 0"] * 3)
    # while a block is in use, the next one is copied, and never over the one in use
    for index, step in enumerate(second):
        if step.action == "enter":
            uploads = [s for s in second[index + 1 : index + 3] if s.action == "upload"]
            assert [s.key[1] for s in uploads] == [(step.key[1] + 1) % 6]
            assert all(s.place != step.place for s in uploads)


def test_a_late_block_never_takes_the_slot_that_was_used_last(block_bytes: int):
    """On a GPU its copy would wait for the block that is being computed, and hide behind nothing."""
    file = numbered_file(6)
    file.before_load = lambda _: time.sleep(0.01)
    with BlockStore([file], CPU, policy="stream") as store:
        one_pass(store.source(), 6)
        one_pass(store.source(), 6)
        places = [step.place for step in store.trace.of("upload")]
    assert len(places) >= 12
    assert all(place != before for before, place in itertools.pairwise(places))


def test_blocks_in_the_host_cache_are_read_once(block_bytes: int):
    with BlockStore([numbered_file(8)], CPU, policy="stream", ram_budget=8 * block_bytes) as store:
        for _ in range(4):
            one_pass(store.source(), 8)
        assert store.trace.counts["read"] == 8
        assert store.trace.counts["upload"] >= 4 * 8


def test_what_does_not_fit_is_read_ahead_through_the_ring(block_bytes: int):
    file = numbered_file(8)
    with BlockStore([file], CPU, policy="stream", ram_budget=6 * block_bytes) as store:
        one_pass(store.source(), 8)
        one_pass(store.source(), 8)
        store.trace.steps.clear()
        one_pass(store.source(), 8)
        one_pass(store.source(), 8)
        reads = [step.key[1] for step in store.trace.of("read")]
        assert store.report.host_bytes == 6 * block_bytes
        kept = {key[1] for key in (place.key for place in store._host.cache._places) if key}
        steps = list(store.trace.steps)
    assert len(kept) == 4
    assert set(reads) == set(range(8)) - kept
    for position, step in enumerate(steps):
        if step.action == "read" and position > 8:
            before = [s for s in steps[:position] if s.action == "enter"]
            assert before and before[-1].key != step.key  # begun while an earlier block was computed


def test_the_budget_of_host_memory_is_kept(block_bytes: int):
    for blocks in range(2, 14):
        with BlockStore([numbered_file(10)], CPU, policy="stream", ram_budget=blocks * block_bytes) as store:
            one_pass(store.source(), 10)
            one_pass(store.source(), 10)
            assert store.report.host_bytes <= blocks * block_bytes or blocks >= 10


def test_resident_copies_each_block_once(block_bytes: int):
    with BlockStore([numbered_file(8)], CPU, policy="resident") as store:
        for _ in range(3):
            one_pass(store.source(), 8)
        assert store.trace.counts["upload"] == 8
        assert store.report.device_bytes == 8 * block_bytes


def test_policies_order_the_device_memory(block_bytes: int):
    taken = {}
    for policy in ("stream", "auto", "resident"):
        budget = 6 * block_bytes if policy == "auto" else None
        with BlockStore([numbered_file(10)], CPU, policy=policy, vram_budget=budget) as store:
            for _ in range(3):
                one_pass(store.source(), 10)
            taken[policy] = store.report.device_bytes
    assert taken["stream"] == 2 * block_bytes
    assert taken["resident"] == 10 * block_bytes
    assert taken["stream"] <= taken["auto"] <= 6 * block_bytes


def test_auto_keeps_the_blocks_that_the_measured_speeds_ask_for_within_the_budget(block_bytes: int):
    with BlockStore([numbered_file(10)], CPU, policy="auto", vram_budget=7 * block_bytes) as store:
        one_pass(store.source(), 10)
        store._lane.speed = lambda: Speed(bandwidth=1e6, block_seconds=block_bytes / 1e6)
        one_pass(store.source(), 10)
        one_pass(store.source(), 10)
        assert store.resident_count == 1  # copies as long as the computation: the margin asks for one
        store._lane.speed = lambda: Speed(bandwidth=1e6, block_seconds=0.0)
        one_pass(store.source(), 10)
        one_pass(store.source(), 10)
        assert store.resident_count == 5
        assert store.report.device_bytes == 7 * block_bytes
        store.trace.steps.clear()
        one_pass(store.source(), 10)
        places = [step.place for step in store.trace.of("enter")]  # uploads may begin in the pass before
        assert places.count("resident") == 5
        assert sum(place.startswith("slot") for place in places) == 5


def test_auto_keeps_none_when_the_computation_hides_the_copies(block_bytes: int):
    with BlockStore([numbered_file(4)], CPU, policy="auto") as store:
        one_pass(store.source(), 4)
        store._lane.speed = lambda: Speed(bandwidth=1e9, block_seconds=1.0)
        one_pass(store.source(), 4)
        assert store.resident_count == 0


def test_a_budget_that_holds_less_than_the_policy_needs_is_refused(block_bytes: int):
    for policy, blocks in (("stream", 1), ("resident", 9)):
        with pytest.raises(BudgetError, match="GiB") as caught:
            BlockStore([numbered_file(10)], CPU, policy=policy, vram_budget=blocks * block_bytes)
        assert caught.value.code == "budget_exceeded"


def test_two_experts_share_slots_and_host_places(block_bytes: int):
    high, low = numbered_file(6), numbered_file(6, first=100)
    with BlockStore([high, low], CPU, policy="stream", ram_budget=8 * block_bytes) as store:
        for expert, first in ((0, 0), (0, 0), (1, 100), (1, 100), (0, 0)):
            one_pass(store.source(expert), 6, first)
            assert store.report.device_bytes == 2 * block_bytes
            assert store.report.host_bytes <= 8 * block_bytes
            places = [place.key for place in store._host.cache._places if place.key]
            assert sum(key[0] == expert for key in places) == 6


def test_both_experts_stay_on_the_host_when_the_budget_holds_them(block_bytes: int):
    high, low = numbered_file(6), numbered_file(6, first=100)
    with BlockStore([high, low], CPU, policy="stream", ram_budget=12 * block_bytes) as store:
        for expert, first in ((0, 0), (1, 100), (0, 0), (1, 100)):
            one_pass(store.source(expert), 6, first)
        assert store.trace.counts["read"] == 12


def test_free_places_are_filled_with_the_next_expert_before_it_is_asked_for(block_bytes: int):
    high, low = numbered_file(6), numbered_file(6, first=100)
    with BlockStore([high, low], CPU, policy="stream", ram_budget=12 * block_bytes) as store:
        for _ in range(100):
            one_pass(store.source(0), 6)
        read = {step.key for step in store.trace.of("read")}
        assert (1, 0) in read and len([key for key in read if key[0] == 0]) == 6
        one_pass(store.source(1), 6, 100)
        one_pass(store.source(0), 6)
        assert store.trace.counts["read"] == 12


def test_the_next_expert_takes_no_place_that_the_running_one_needs(block_bytes: int):
    high, low = numbered_file(6), numbered_file(6, first=100)
    with BlockStore([high, low], CPU, policy="stream", ram_budget=8 * block_bytes) as store:
        for _ in range(5):
            one_pass(store.source(0), 6)
        assert not [step for step in store.trace.of("read") if step.key[0] == 1]


def test_the_idle_expert_holds_no_device_memory(block_bytes: int):
    high, low = numbered_file(4), numbered_file(4, first=100)
    with BlockStore([high, low], CPU, policy="resident") as store:
        one_pass(store.source(0), 4)
        before = store.report.device_bytes
        with store.source(1).onload(0):
            held = [slot.key for slot in (*store._slots._resident, *store._slots._ring) if slot.key]
            assert all(key[0] == 1 for key in held)
        one_pass(store.source(1), 4, 100)
        assert store.report.device_bytes == before == 4 * block_bytes


def test_slots_fit_the_larger_of_two_layouts():
    small = numbered_file(3)
    large = MemoryFile({i: mixed_block(i) for i in range(3)})
    with BlockStore([small, large], CPU, policy="stream") as store:
        one_pass(store.source(0), 3)
        for index in range(3):
            with store.source(1).onload(index) as weights:
                expected = dequantize(mixed_block(index)["b.weight"], torch.float32)
                assert torch.equal(dequantize(weights["b.weight"], torch.float32), expected)
        one_pass(store.source(0), 3)


def test_shrinking_frees_buffers_and_keeps_the_rest_right(block_bytes: int):
    with BlockStore([numbered_file(8)], CPU, policy="resident") as store:
        one_pass(store.source(), 8)
        for resident in (4, 2, 1, 0):
            ring = 0 if resident == 4 else 2
            store.shrink(resident)
            assert store.report.device_bytes == (resident + ring) * block_bytes
            one_pass(store.source(), 8)
            assert store.report.device_bytes == min(8, resident + 2) * block_bytes
            assert store.resident_count == resident


def test_a_jump_in_the_order_of_blocks_is_served(block_bytes: int):
    with BlockStore([numbered_file(12)], CPU, policy="stream", ram_budget=4 * block_bytes) as store:
        generator = torch.Generator().manual_seed(0)
        for index in torch.randint(0, 12, (60,), generator=generator).tolist():
            with store.source().onload(index) as weights:
                assert float(weights["a.weight"].data[0, 0]) == index


def test_release_gives_everything_back_and_the_next_block_takes_it_again(block_bytes: int):
    with BlockStore([numbered_file(5)], CPU, policy="stream", ram_budget=100 * block_bytes) as store:
        one_pass(store.source(), 5)
        slot = weakref.ref(store._slots._ring[0].buffer.untyped_storage())
        store.release_device()
        gc.collect()
        assert slot() is None
        assert store.report.device_bytes == 0
        assert store.report.host_bytes > 0
        store.release()
        assert store.report.host_bytes == 0
        one_pass(store.source(), 5)


def test_closing_ends_the_thread_and_frees_the_store(block_bytes: int):
    assert not readers()
    store = BlockStore([numbered_file(5)], CPU, policy="stream", ram_budget=4 * block_bytes)
    one_pass(store.source(), 5)
    assert len(readers()) == 1
    store.close()
    assert not readers()
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, torch.OutOfMemoryError])
def test_an_error_in_a_block_leaves_no_thread_and_a_usable_store(error, block_bytes: int):
    with BlockStore([numbered_file(6)], CPU, policy="stream", ram_budget=3 * block_bytes) as store:
        with pytest.raises(error):
            for index in range(6):
                with store.source().onload(index):
                    if index == 3:
                        raise error
        one_pass(store.source(), 6)
    assert not readers()


def test_interrupt_while_waiting_for_a_slow_disk(block_bytes: int):
    file = numbered_file(6)
    begun, go_on = threading.Event(), threading.Event()

    def slow(name: str) -> None:
        if threading.current_thread() is not threading.main_thread() and name.startswith("blocks.2."):
            begun.set()
            go_on.wait(10)

    with BlockStore([file], CPU, policy="stream", ram_budget=2 * block_bytes) as store:
        file.before_load = slow
        with store.source().onload(0), store.source().onload(1):
            pass
        assert begun.wait(10)
        go_on.set()
    assert not readers()


def test_an_unreadable_block_is_reported_where_it_is_needed_and_not_kept(block_bytes: int):
    file = numbered_file(6)
    failing = True

    def broken(name: str) -> None:
        if failing and name.startswith("blocks.3."):
            raise OSError("disk gone")

    with BlockStore([file], CPU, policy="stream", ram_budget=4 * block_bytes) as store:
        file.before_load = broken
        with pytest.raises(OSError, match="disk gone"):
            one_pass(store.source(), 6)
        failing = False
        one_pass(store.source(), 6)


def test_host_memory_that_is_not_to_be_had_is_done_without(monkeypatch, block_bytes: int):
    from wanfit.offload import host_cache

    def refuse(nbytes: int, pin_for: object) -> None:
        raise MemoryError(f"{nbytes} bytes of host memory")

    monkeypatch.setattr(host_cache, "HostBuffer", refuse)
    with BlockStore([numbered_file(6)], CPU, policy="stream", ram_budget=100 * block_bytes) as store:
        one_pass(store.source(), 6)
        one_pass(store.source(), 6)
        assert store.report.notices and "Host memory ran out" in store.report.notices[0]
        assert store.report.host_bytes <= 2 * block_bytes


def test_weights_are_never_written_to_the_file():
    weight = torch.ones(4, 64)
    file = MemoryFile({i: {"a.weight": StoredWeight("f32", (4, 64), weight)} for i in range(3)})
    with BlockStore([file], CPU, policy="stream") as store:
        for index in range(3):
            with store.source().onload(index) as weights:
                weights["a.weight"].data.zero_()
    assert torch.equal(weight, torch.ones(4, 64))
