"""Changes of blocks as they travel: the same numbers in place, kept and streamed. CUDA: tests/cuda/offload."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from block_patches import require_same, some_patches, strengths, with_other_strengths

from wanfit.blocks import BlockPatches
from wanfit.errors import InputError
from wanfit.offload import BlockStore, PatchStore
from wanfit.offload.patches import PatchFile

CPU, META = torch.device("cpu"), torch.device("meta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_streamed_through_two_slots_they_are_the_tensors_that_were_given(dtype: torch.dtype):
    """What `PatchStore` does on a device, with the store's plain copies."""
    patches = some_patches()
    file = PatchFile(list(patches.values()), dtype)
    total = sum(block.nbytes(dtype) for block in patches.values())
    with BlockStore([file], CPU, policy="stream", ram_budget=file.largest * len(file), ring=2) as store:
        for _ in range(3):
            for place, given in enumerate(patches.values()):
                with store.onload(0, place) as weights:
                    require_same(given.placed(lambda name, held=weights: held[name].data), given, dtype)
        assert store.report.device_bytes == 2 * file.largest
        assert total <= store.report.host_bytes <= len(file) * file.largest
        slots = {step.place for step in store.trace.of("enter")}
    assert slots == {"slot 0", "slot 1"}
    assert max(block.nbytes(dtype) for block in patches.values()) <= file.largest


@pytest.mark.parametrize("keep", [True, False])
def test_on_the_cpu_they_are_read_in_place(keep: bool):
    patches = some_patches()
    store = PatchStore(patches, CPU, torch.bfloat16, keep=keep)
    for index in range(6):
        with store.onload(index) as held:
            assert held is patches.get(index) or held == BlockPatches()
    assert store.device_bytes == store.host_bytes == 0


def test_kept_ones_are_placed_once_and_counted():
    patches = some_patches()
    store = PatchStore(patches, META, torch.bfloat16, keep=True)
    expected = 0
    for index in (0, 1, 1, 0):
        with store.onload(index) as held:
            first = held.low_rank["self_attn.q"][0].down
            assert (first.device, first.dtype) == (META, torch.bfloat16)
        with store.onload(index) as held:
            assert held.low_rank["self_attn.q"][0].down is first
    expected = sum(patches[index].nbytes(torch.bfloat16) for index in (0, 1))
    assert store.device_bytes == expected
    store.release_device()
    assert store.device_bytes == 0


def test_other_strengths_of_the_same_tensors_are_taken_and_other_tensors_are_not():
    patches = some_patches()
    store = PatchStore(patches, META, torch.bfloat16, keep=True)
    with store.onload(1) as held:
        first = held.low_rank["self_attn.q"][0].down
    doubled = with_other_strengths(patches, 2.0)
    assert store.take_strengths(doubled)
    with store.onload(1) as held:
        assert strengths(held) == strengths(doubled[1]) != strengths(patches[1])
        assert held.low_rank["self_attn.q"][0].down is first, "not copied again"
    others = some_patches()  # equal numbers in other tensors
    fewer = {index: block for index, block in patches.items() if index}
    pair = patches[0].low_rank["self_attn.q"][0]
    swapped = dict(patches)
    swapped[0] = BlockPatches({"self_attn.q": [dataclasses.replace(pair)]}, patches[0].differences)
    for changed in (others, fewer, swapped, {}):
        assert not store.take_strengths(changed)
        with store.onload(1) as held:
            assert strengths(held) == strengths(doubled[1])


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_nan_and_infinity_are_refused_by_block_and_name(value: float, dtype: torch.dtype):
    """Attention on the CPU makes zeros of NaN: the result would not show it."""
    if dtype == torch.float8_e4m3fn and value == torch.inf:
        pytest.skip("float8_e4m3fn has no infinity")
    patches = some_patches(dtype=dtype)
    damaged = patches[3].low_rank["self_attn.q"][1].up
    damaged[5, 2] = value
    store = PatchStore(patches, torch.device("cpu"), torch.float32, keep=False)
    with store.onload(1):
        pass
    with pytest.raises(InputError, match=r"block 3 .*self_attn\.q 1 up") as caught, store.onload(3):
        pass
    assert caught.value.code == "lora_invalid"
