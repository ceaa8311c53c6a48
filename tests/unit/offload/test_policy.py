"""Which blocks stay: pure arithmetic."""

from __future__ import annotations

import pytest

from wanfit.offload.policy import blocks_to_hide, resident_within, spread


@pytest.mark.parametrize("count", [1, 2, 7, 30, 40])
def test_spread_is_a_permutation_whose_beginnings_leave_no_long_gap(count: int):
    order = spread(count)
    assert sorted(order) == list(range(count))
    for taken in range(1, count):
        chosen = sorted(order[:taken])
        gaps = [(b - a) % count or count for a, b in zip(chosen, [*chosen[1:], chosen[0]], strict=True)]
        assert max(gaps) <= 4 * -(-count // taken)


def test_no_block_stays_when_copies_are_fast():
    assert blocks_to_hide(40, copy_seconds=0.010, block_seconds=0.080) == 0


def test_blocks_stay_so_that_copies_take_no_longer_than_the_computation():
    # 25 GB/s, a bf16 block of 703 MB, 14 ms of computation: half of the copies fit
    copy, block = 0.028, 0.014
    resident = blocks_to_hide(40, copy, block)
    assert (40 - resident) * copy <= 40 * block
    assert (40 - resident + 3) * copy > 40 * block


def test_all_stay_when_nothing_can_be_hidden():
    assert blocks_to_hide(40, copy_seconds=1.0, block_seconds=1e-6) == 40


def test_the_budget_limits_them():
    assert resident_within(None, 100, 2, 40) == 40
    assert resident_within(4000, 100, 2, 40) == 40
    assert resident_within(3999, 100, 2, 40) == 37
    assert resident_within(250, 100, 2, 40) == 0
