"""The plan's forwards against the peaks that an H200 took (docs/measurements/plan_h200_2026-12-01.json)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from wanfit.blocks import ForwardSettings
from wanfit.memory.demand import LIBRARIES, Video, denoise_demand
from wanfit.memory.machine import stated_machine
from wanfit.memory.presets import transformer_preset

MEASURED = Path(__file__).resolve().parents[3] / "docs" / "measurements" / "plan_h200_2026-12-01.json"
ROWS = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]
PRESETS = {
    "bf16": "t2v-a14b:bf16", "fp8_scaled": "t2v-a14b:fp8", "q8_0": "t2v-a14b:q8_0", "q4_k": "t2v-a14b:q4_k_s",
    "q5_k": "t2v-a14b:q5_k_s", "q6_k": "t2v-a14b:q6_k",
}  # fmt: skip
"""Presets whose blocks are stored as the benchmark's."""


def predicted(row: dict[str, Any]) -> int:
    """The plan's bytes, with the benchmark's two copies of inputs and outputs instead of a sampling loop's."""
    part = transformer_preset(PRESETS[row["layout"]])
    machine = dataclasses.replace(stated_machine(140, 128), fused=row["fused"], float8=row["float8"])
    video = Video(row["width"], row["height"], row["num_frames"], image=False)
    settings = ForwardSettings(4096, packed_attention=row["packed"])
    demand = denoise_demand("denoise", part, part.block_bytes, video, machine, settings)
    latents = part.in_channels * video.latent_frames * (video.width // 8) * (video.height // 8)
    total = demand.vram_needed - demand.vram["latents"] - demand.vram["text embeddings"]
    total += machine.dtype.itemsize * (2 * latents + 512 * 4096)
    total -= 0 if row["workspace"] else LIBRARIES
    total += (row["rests"] - 1) * part.rest_bytes(machine.dtype)
    return total + (max(0, row["resident"] - 2)) * part.block_bytes


@pytest.mark.parametrize(
    "row", ROWS, ids=lambda row: f"{row['layout']}-{row['policy']}-{row['height']}-{row['source']}"
)
def test_a_forward_takes_what_the_plan_says(row: dict[str, Any]) -> None:
    """Within 5 %, never under by more than 2 %."""
    assert -0.02 <= predicted(row) / row["allocated"] - 1 <= 0.05


def test_the_measurements_cover_what_they_should() -> None:
    assert len(ROWS) >= 22
    assert {row["layout"] for row in ROWS} == set(PRESETS)
    assert {row["policy"] for row in ROWS} == {"stream", "resident", "auto"}
    assert {row["packed"] for row in ROWS} == {row["fused"] for row in ROWS} == {True, False}
