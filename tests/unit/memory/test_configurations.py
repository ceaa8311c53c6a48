"""The plan against configurations on an H200: 36 that its constants were not fitted to, and 42 after what those showed was
mended."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from wanfit.memory.demand import Video, vae_demand
from wanfit.memory.machine import Machine, Speeds, stated_machine
from wanfit.memory.parts import Model
from wanfit.memory.plan import Options, make_plan
from wanfit.memory.presets import text_preset, transformer_preset, vae_preset
from wanfit.memory.tiles import decode_shape
from wanfit.vae import plan_decode

MEASUREMENTS = Path(__file__).resolve().parents[3] / "docs" / "measurements"
STORED = MEASUREMENTS / "plan_configurations_h200_2026-12-01.json"
ROWS: list[dict[str, Any]] = json.loads(STORED.read_text(encoding="utf-8"))["rows"]
AFTER = MEASUREMENTS / "plan_configurations_h200_2026-12-01_after.json"
ROWS_AFTER: list[dict[str, Any]] = json.loads(AFTER.read_text(encoding="utf-8"))["rows"]
SIZES = {"480p": (832, 480), "720p": (1280, 704), "1088p": (1920, 1088)}
LOOP = ("latents", "text embeddings")


def name_of(row: dict[str, Any]) -> str:
    kind = "packed" if row.get("packed") else row.get("policy", row.get("gib"))
    return f"{row.get('preset', row.get('variant'))}-{row['size']}-{row['frames']}-{kind}"


def size_of(row: dict[str, Any], model: Model) -> tuple[int, int, int]:
    multiple = model.variant.size_multiple
    width, height = (side // multiple * multiple for side in SIZES[row["size"]])
    return width, height, row["frames"]


def the_card() -> Machine:
    return dataclasses.replace(stated_machine(140, 128, capability=(9, 0)), fused=True, speeds=None)


def forward_bytes(row: dict[str, Any]) -> tuple[int, int]:
    """With no block that stays, and with those that the plan says may: the run had no sampling loop, but its inputs."""
    part = dataclasses.replace(transformer_preset(row["preset"]), num_layers=row["blocks"])
    model = Model((part,), text_preset(), vae_preset("vae-2.1"))
    size = size_of(row, model)
    plan = make_plan(
        model,
        dataclasses.replace(
            the_card(), policy=row["policy"], speeds=Speeds(**row["speeds"]) if "speeds" in row else None
        ),
        *size,
        Options(image=False, packed_attention=row["packed"], batch=row.get("batch", 1)),
    )
    stage = plan.stages[1]
    latents = decode_shape(model, plan.video)[2:]
    places = torch.Size(latents).numel()
    given = 2 * row.get("batch", 1) * (places * (part.in_channels + part.out_channels) + 512 * 4096)
    loop = sum(stage.vram[cause] for cause in LOOP)
    assert plan.resident_least == (0 if row["policy"] == "auto" and "speeds" not in row else plan.resident)
    return stage.vram_needed - loop + given, stage.vram_peak - loop + given


def decode_bytes(row: dict[str, Any]) -> int:
    name = "t2v-a14b:fp8" if row["variant"] == "vae-2.1" else "ti2v-5b:fp16"
    model = Model((transformer_preset(name),), text_preset(), vae_preset(row["variant"]))
    video = Video(*size_of(row, model), image=False, size_multiple=model.variant.size_multiple)
    tiles = plan_decode(
        model.vae.description, decode_shape(model, video), dtype=torch.bfloat16, device="cuda", budget_bytes=2**50,
        grid=tuple(row["grid"]), start=row["split"] - 1, chunk=row["chunk"],
    )  # fmt: skip
    return vae_demand("decode and save", tiles, model.vae, video, the_card()).vram_needed


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_configuration_takes_what_the_plan_says(row: dict[str, Any]) -> None:
    """Within 5 %, never under by more than 2 %, of all that was allocated. `auto` had kept no block there, and the
    plan, which was not told how fast the bus is, has to say so: from none to all."""
    taken = row["allocated"] + row["before"]
    if row["part"] == "decode":
        least = most = decode_bytes(row)
    else:
        least, most = forward_bytes(row)
    if row.get("policy") == "auto":
        assert most >= taken
    else:
        least = most
    assert -0.02 <= least / taken - 1 <= 0.05


@pytest.mark.parametrize("row", ROWS_AFTER, ids=name_of)
def test_the_same_again_with_the_speeds_that_auto_measured(row: dict[str, Any]) -> None:
    planned = decode_bytes(row) if row["part"] == "decode" else forward_bytes(row)[1]
    assert -0.02 <= planned / row["allocated"] - 1 <= 0.05


def test_the_configurations_are_those_asked_for() -> None:
    """Models, sizes, lengths, policies, attention, decode grids."""
    assert len(ROWS) == 36 and not any("failed" in row for row in ROWS)
    forwards = [row for row in ROWS if row["part"] == "forward"]
    assert {"i2v-a14b:fp8", "i2v-a14b:q8_0", "i2v-a14b:q4_k_m", "t2v-a14b:bf16", "ti2v-5b:fp16"} <= {
        row["preset"] for row in forwards
    }
    assert {row["size"] for row in forwards} == set(SIZES) and {row["frames"] for row in forwards} == {33, 81, 121}
    assert Counter(row["policy"] for row in forwards)["stream"] == len(forwards) - 3
    assert {row["packed"] for row in forwards} == {True, False}
    assert len({tuple(row["grid"]) for row in ROWS if row["part"] == "decode"}) >= 4
