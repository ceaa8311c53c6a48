"""The plan's verdicts: monotone, named, and what it suggests fits."""

import dataclasses
import json
import math

import pytest
import torch

from wanfit.errors import BudgetError, InputError
from wanfit.memory.advice import Search, largest_official, nearest
from wanfit.memory.machine import Machine, Speeds, stated_machine
from wanfit.memory.parts import Model
from wanfit.memory.plan import Options, make_plan
from wanfit.memory.presets import parts_of
from wanfit.memory.report import plan_lines
from wanfit.memory.verdict import TIGHT
from wanfit.offload.policy import blocks_to_hide

GIB = 2**30
A14B = (1280, 720, 81)


def model_of(name: str) -> Model:
    transformers, text, vae = parts_of(name)
    return Model(tuple(transformers), text, vae)


@pytest.fixture(scope="module")
def fp8() -> Model:
    return model_of("i2v-a14b:fp8")


def test_stages_of_a_pair_and_of_a_single_model(fp8):
    plan = make_plan(fp8, stated_machine(12, 32), *A14B)
    names = [stage.name for stage in plan.stages]
    assert names == ["text", "encode image", "denoise high", "switch", "denoise low", "decode and save"]
    single = make_plan(model_of("ti2v-5b:fp16"), stated_machine(12, 32), 1280, 704, 121)
    assert [stage.name for stage in single.stages] == ["text", "denoise", "decode and save"]
    pair = make_plan(model_of("t2v-a14b:fp8"), stated_machine(12, 32), *A14B)
    assert "encode image" not in [stage.name for stage in pair.stages]


def test_the_forward_at_720p_is_what_the_prototype_took(fp8):
    """design.md section 5, measured on an H200: 4.87 GiB with two fp8 slots and chunks of 4096."""
    plan = make_plan(fp8, stated_machine(24, 64), *A14B)
    denoise = plan.stages[2]
    assert abs(denoise.vram_needed / GIB - 4.87) < 0.25
    assert denoise.vram["residual"] == 75_600 * 5120 * 2
    assert denoise.vram["q, k, v"] == 3 * denoise.vram["residual"]


def test_less_memory_is_never_a_better_verdict(fp8):
    order = {"does not fit": 0, "tight": 1, "fits": 2}
    verdicts = [order[make_plan(fp8, stated_machine(gib / 2, 32), *A14B).verdict] for gib in range(4, 50)]
    assert verdicts == sorted(verdicts)
    assert set(verdicts) == {0, 1, 2}


@pytest.mark.parametrize("preset", ["i2v-a14b:fp8", "ti2v-5b:fp16"])
def test_nor_is_it_on_the_cpu_where_what_waits_for_the_decode_is_ram_too(preset):
    order = {"does not fit": 0, "tight": 1, "fits": 2}
    model = model_of(preset)
    machines = [Machine("cpu", 0, GIB * k // 4, torch.float32, torch.float32, text="cpu") for k in range(12, 48)]
    plans = [make_plan(model, machine, 1280, 704, 81) for machine in machines]
    assert all(plan.stages[-1].ram_needed <= plan.machine.ram for plan in plans if plan.fits)
    verdicts = [order[plan.verdict] for plan in plans]
    assert verdicts == sorted(verdicts)
    assert {0, 2} <= set(verdicts)


@pytest.mark.parametrize("preset", ["i2v-a14b:fp8", "i2v-a14b:q4_k_m", "t2v-a14b:fp16", "ti2v-5b:fp16"])
@pytest.mark.parametrize("vram", [4, 6, 8, 12, 24])
def test_what_is_said_to_fit_stays_within_the_card(preset, vram):
    machine = stated_machine(vram, 32)
    model = model_of(preset)
    width, height = model.variant.sizes[0]
    plan = make_plan(model, machine, width, height, model.variant.num_frames)
    if plan.verdict == "fits":
        assert all(stage.vram_needed <= TIGHT * machine.vram for stage in plan.stages)
    if plan.fits:
        assert all(stage.vram_peak <= machine.vram for stage in plan.stages), (
            "blocks that stay use no more than is there"
        )
        assert plan.weights_budget >= 2 * model.slot_bytes
        plan.require()
    else:
        assert plan.limiting in [stage.name for stage in plan.stages] and plan.reason


@pytest.mark.parametrize("prefer", ["size", "length"])
def test_suggestions_fit_and_the_next_larger_one_does_not(fp8, prefer):
    machine = stated_machine(4, 16)
    plan = make_plan(fp8, machine, *A14B)
    assert plan.verdict == "does not fit" and "q, k, v" in plan.reason and "3.00 GiB" in plan.reason
    with pytest.raises(BudgetError) as caught:
        plan.require("Use less")
    assert caught.value.code == "budget_exceeded" and caught.value.stage == "plan"
    first, second = nearest(Search(fp8, machine), *A14B, prefer)
    shorter, smaller = (first, second) if prefer == "size" else (second, first)
    assert (shorter.width, shorter.height) == A14B[:2] and shorter.num_frames < 81
    assert smaller.num_frames == 81 and abs(smaller.width / smaller.height - 16 / 9) < 0.06
    for settings in (first, second):
        assert make_plan(fp8, machine, settings.width, settings.height, settings.num_frames).fits
    assert not make_plan(fp8, machine, *A14B[:2], shorter.num_frames + 4).fits
    assert not make_plan(fp8, machine, smaller.width + 16, smaller.height + 16, 81).fits


def test_too_little_for_anything_suggests_nothing(fp8):
    machine = stated_machine(2, 16)
    assert not make_plan(fp8, machine, *A14B).fits
    assert nearest(Search(fp8, machine), *A14B) == []
    assert largest_official(Search(fp8, machine)) is None


def test_the_size_adapts_to_the_card(fp8):
    large = largest_official(Search(fp8, stated_machine(12, 32)))
    assert large is not None and (large.width, large.height, large.num_frames) == A14B
    upright = largest_official(Search(fp8, stated_machine(12, 32)), portrait=True)
    assert upright is not None and (upright.width, upright.height) == (720, 1280)
    whole = largest_official(Search(fp8, stated_machine(4, 16)), prefer="length")
    assert whole is not None and (whole.width, whole.height, whole.num_frames) == (832, 480, 81)


def test_smaller_chunks_come_before_a_refusal(fp8):
    roomy = make_plan(fp8, stated_machine(12, 32), *A14B)
    narrow = make_plan(fp8, stated_machine(5.7, 32), *A14B)
    assert roomy.chunk_tokens == 4096 and narrow.chunk_tokens < 4096 and narrow.verdict == "tight"
    assert make_plan(fp8, stated_machine(12, 32), *A14B, Options(chunk_tokens=1000)).chunk_tokens == 1000


def test_all_blocks_have_to_be_there_with_the_policy_resident(fp8):
    assert make_plan(fp8, stated_machine(12, 64, policy="auto"), *A14B).fits
    plan = make_plan(fp8, stated_machine(12, 64, policy="resident"), *A14B)
    assert not plan.fits and plan.limiting == "denoise high"
    assert make_plan(fp8, stated_machine(24, 64, policy="resident"), *A14B).resident == 40
    assert make_plan(fp8, stated_machine(24, 64, policy="stream"), *A14B).resident == 0


def test_transfers_are_hidden_or_cost_what_they_take(fp8):
    def planned(block_seconds: float, ram: float = 64, disk: float | None = None):
        speeds = Speeds(bandwidth=25e9, block_seconds=block_seconds, disk=disk)
        return make_plan(fp8, stated_machine(6, ram, speeds=speeds), 832, 480, 81)

    slow_card = planned(0.1)
    assert slow_card.resident == 0 and slow_card.traffic is not None and slow_card.traffic.slowdown == 1.0
    fast_card = planned(0.001)
    assert fast_card.resident > 0 and fast_card.traffic is not None
    passing = 40 - fast_card.resident
    assert math.isclose(fast_card.traffic.slowdown or 0, passing * fp8.slot_bytes / 25e9 / (40 * 0.001))
    little_ram = planned(0.1, ram=12, disk=0.5e9)
    assert little_ram.traffic is not None and little_ram.traffic.read > 0
    assert (little_ram.traffic.slowdown or 0) > 1
    assert planned(0.1, ram=12).traffic.slowdown is None, "unknown without the disk's speed"  # type: ignore[union-attr]


def test_ram_and_the_page_file_are_limits_too(fp8):
    machine = stated_machine(24, 64)
    plan = make_plan(fp8, dataclasses.replace(machine, ram=2**28), *A14B)
    assert not plan.fits and "RAM" in plan.reason
    plan = make_plan(fp8, dataclasses.replace(machine, commit=2**28), *A14B)
    assert not plan.fits and "page file" in plan.reason


def test_a_cpu_run_needs_ram_only(fp8):
    plan = make_plan(fp8, stated_machine(0, 64), 832, 480, 33)
    assert plan.fits and plan.machine.dtype == torch.float32 and plan.traffic is None
    assert all(stage.vram_needed == 0 for stage in plan.stages)
    assert max(stage.ram_needed for stage in plan.stages) > 3 * GIB
    assert not make_plan(fp8, stated_machine(0, 5), 1280, 720, 81).fits


def test_precisions_that_need_no_copy_of_the_weights(fp8):
    plain, ada = (make_plan(fp8, stated_machine(12, 32, capability=c), *A14B) for c in ((8, 6), (8, 9)))
    assert plain.stages[2].vram["weights in compute precision"] > 150 * 2**20
    assert ada.stages[2].vram["weights in compute precision"] == 0


@pytest.mark.parametrize(
    ("values", "code"),
    [((1280, 721, 81), "size_invalid"), ((0, 720, 81), "size_invalid"), ((1280, 720, 80), "frames_invalid"),
     ((1280, 720, 0), "frames_invalid"), ((10**9, 720, 81), "size_invalid"), ((1280, 720, 10**9), "frames_invalid")],
)  # fmt: skip
def test_impossible_numbers(fp8, values, code):
    with pytest.raises(InputError) as caught:
        make_plan(fp8, stated_machine(12, 32), *values)
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("vram", "ram"), [(-1, 32), (math.nan, 32), (math.inf, 32), (12, 0), (12, math.nan), (5000, 32)]
)
def test_impossible_machines(vram, ram):
    with pytest.raises(InputError):
        stated_machine(vram, ram)


def test_the_plan_is_json(fp8):
    said = json.loads(json.dumps(make_plan(fp8, stated_machine(12, 32), *A14B).to_json()))
    assert said["verdict"] == "fits" and said["tokens"] == 75_600
    assert {"vram_needed", "ram_needed", "vram", "ram"} <= said["stages"][0].keys()


def test_a_machine_without_anything_still_gets_a_verdict(fp8):
    plan = make_plan(fp8, Machine("cuda", 0, 0), *A14B)
    assert not plan.fits and plan.reason


def test_loras_stay_where_there_is_room_and_else_stream_with_their_block(fp8):
    """Kept: all on the device. Streamed: two blocks' there, all of them pinned in RAM, which blocks then lack."""
    total, largest = 600 * 2**20, 15 * 2**20
    plain, kept, streamed = (
        make_plan(fp8, stated_machine(vram, 32), *A14B, Options(loras=loras))
        for vram, loras in ((48, (0, 0)), (48, (total, largest)), (8, (total, largest)))
    )
    assert kept.keep_loras and not streamed.keep_loras
    assert "LoRA" not in plain.stages[2].vram and kept.stages[2].vram["LoRA"] == total
    assert "LoRA" not in kept.stages[2].ram and kept.ram_budget == plain.ram_budget
    assert streamed.stages[2].vram["LoRA"] == 2 * largest and streamed.stages[2].ram["LoRA"] == total
    assert streamed.ram_budget == stated_machine(8, 32).ram_budget - total
    few = make_plan(fp8, stated_machine(8, 32), *A14B, Options(loras=(total, total)))
    assert few.stages[2].vram["LoRA"] == total, "all in one block: never more than there is"


def test_loras_count_in_the_search_too(fp8):
    """What is suggested fits with them, and is less than what fits without."""
    machine, loras = stated_machine(4, 16), (2 * GIB, GIB // 4)
    plain, less = (nearest(Search(fp8, machine, options), *A14B) for options in (Options(), Options(loras=loras)))
    assert less[0].num_frames < plain[0].num_frames and less[1].width < plain[1].width
    for way in less:
        plan = make_plan(fp8, machine, way.width, way.height, way.num_frames, Options(loras=loras))
        assert plan.fits and plan.stages[2].vram["LoRA"] == GIB // 2
    official = largest_official(Search(fp8, machine, Options(loras=loras)), prefer="length")
    assert official is not None and "LoRA" in official.plan.stages[2].vram


def test_auto_says_from_how_many_to_how_many_blocks_stay(fp8):
    """Without the speeds of the machine it cannot be known; with them it is what the store will keep."""
    unknown = make_plan(fp8, stated_machine(12, 64), *A14B)
    assert unknown.resident_least == 0 < unknown.resident
    assert any(f"0 to {unknown.resident} blocks that stay" in line for line in plan_lines(unknown))
    fast_bus = Speeds(bandwidth=50e9, block_seconds=0.1)
    known = make_plan(fp8, stated_machine(12, 64, speeds=fast_bus), *A14B)
    assert known.resident == known.resident_least == 0 and known.stages[2].optional == 0
    slow_bus = Speeds(bandwidth=2e9, block_seconds=0.1)
    known = make_plan(fp8, stated_machine(12, 64, speeds=slow_bus), *A14B)
    wanted = blocks_to_hide(40, fp8.slot_bytes / 2e9, 0.1)
    assert known.resident == known.resident_least == min(wanted, unknown.resident) > 0
    for policy in ("stream", "resident"):
        plan = make_plan(fp8, stated_machine(24, 64, policy=policy), *A14B)
        assert plan.resident_least == plan.resident
