"""Plans at real width on the meta device."""

from __future__ import annotations

import dataclasses
import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan

from wanfit.errors import BudgetError, InputError, TilingError
from wanfit.vae import diffusers_config, plan_decode, plan_encode
from wanfit.vae.adapters import describe
from wanfit.vae.spool import HOST_BYTES
from wanfit.vae.windows import axis_tiles, balanced_cuts

GIB = 1024**3
HD = (1, 16, 21, 90, 160)


def meta_vae(variant: str) -> AutoencoderKLWan:
    with torch.device("meta"):
        return AutoencoderKLWan(**diffusers_config(variant))


@pytest.fixture(scope="module")
def vae() -> AutoencoderKLWan:
    return meta_vae("vae-2.1")


def test_halo_after_the_first_up_block(vae: AutoencoderKLWan) -> None:
    """12 positions, as found by trying smaller ones (design.md, section 2)."""
    stages = describe(vae).decoder[2:]
    (_, tile, _) = axis_tiles(stages, 320, [(0, 440), (440, 840), (840, 1280)], 1)
    assert tile.stages[0].window == (440 // 4 - 12, 840 // 4 + 12)


def test_budget_gives_the_fewest_tiles(vae: AutoencoderKLWan) -> None:
    plan = plan_decode(vae, HD, dtype=torch.bfloat16, device="cuda", budget_bytes=2 * GIB, chunk=1)
    assert plan.predicted_bytes <= 2 * GIB
    for rows in range(1, plan.tiles):
        for columns in range(1, plan.tiles):
            if rows * columns < plan.tiles:
                other = plan_decode(
                    vae, HD, dtype=torch.bfloat16, device="cuda", grid=(rows, columns), start=plan.split - 1, chunk=1
                )
                assert other.predicted_bytes > 2 * GIB
    assert 1 < plan.overhead < 1.2


def test_frames_at_a_time_and_start_are_chosen_with_the_grid(vae: AutoencoderKLWan) -> None:
    """By estimated time among what fits; with little memory fewer frames at a time fit where more do not."""
    rates = {1: 1.08, 2: 1.0, 4: 0.94}
    for budget in (GIB, 2 * GIB, 8 * GIB):
        chosen = plan_decode(vae, HD, dtype=torch.bfloat16, device="cuda", budget_bytes=budget)
        assert chosen.channels_last and not chosen.fold_time and chosen.predicted_bytes <= budget
        times: list[float] = []
        for chunk in rates:
            for start in (0, 1, 2):
                options = {"budget_bytes": budget, "chunk": chunk, "start": start}
                try:
                    plan = plan_decode(vae, HD, dtype=torch.bfloat16, device="cuda", **options)
                except BudgetError:
                    continue
                if plan.feature_bytes <= HOST_BYTES:
                    times.append(plan.overhead * rates[chunk] * (1 + 0.01 * plan.tiles))
        assert chosen.overhead * rates[chosen.chunk] * (1 + 0.01 * chosen.tiles) == pytest.approx(min(times))
    floors: list[float] = []
    for chunk in (None, 2):
        with pytest.raises(BudgetError) as caught:
            plan_decode(vae, HD, dtype=torch.bfloat16, device="cuda", budget_bytes=GIB // 8, chunk=chunk)
        floors.append(float(str(caught.value).partition("at least ")[2].partition(" GiB")[0]))
    assert floors[0] < floors[1]


@pytest.mark.parametrize("dtype,device", [(torch.float32, "cuda"), (torch.bfloat16, "cpu")])
def test_channels_last_is_for_16_bit_on_cuda(vae: AutoencoderKLWan, dtype: torch.dtype, device: str) -> None:
    assert not plan_decode(vae, HD, dtype=dtype, device=device).channels_last


MEASURED = Path(__file__).resolve().parents[3] / "docs" / "measurements" / "vae_h200_2026-12-01.jsonl"
CASES = {
    "480p": ("vae-2.1", (1, 16, 21, 60, 104)),
    "720p": ("vae-2.1", HD),
    "1088p": ("vae-2.1", (1, 16, 21, 136, 240)),
    "2.2": ("vae-2.2", (1, 48, 31, 44, 80)),
}


def measured_passes() -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in MEASURED.read_text(encoding="utf-8").splitlines()]
    labels = ("decode as planned", "encode as planned")
    return [row for row in rows if row["label"] in labels and row["method"].startswith("wanfit")]


@pytest.mark.parametrize("row", measured_passes(), ids=lambda row: f"{row['method']}-{row['case']}-{row['grid']}")
def test_prediction_against_an_h200(row: dict[str, Any]) -> None:
    """Never below what was measured, at most 5 % above it."""
    variant, (batch, channels, frames, height, width) = CASES[row["case"]]
    scale = 8 if variant == "vae-2.1" else 16
    options = {"dtype": torch.bfloat16, "device": "cuda", "grid": tuple(row["grid"]), "chunk": row["chunk"]}
    if row["method"] == "wanfit":
        plan = plan_decode(
            meta_vae(variant), (batch, channels, frames, height, width), start=row["split"] - 1, **options
        )
    else:
        plan = plan_encode(meta_vae(variant), (1, 3, 4 * frames - 3, height * scale, width * scale), **options)
    assert plan.split == row["split"]
    assert row["peak_bytes"] <= plan.predicted_bytes <= 1.05 * row["peak_bytes"]


def test_decodes_and_encodes_were_measured() -> None:
    assert len(measured_passes()) == 15


@pytest.mark.parametrize("shape,longer", [(HD, 1), ((1, 16, 21, 160, 90), 0)])
def test_cuts_go_across_the_longer_side(vae: AutoencoderKLWan, shape: tuple[int, ...], longer: int) -> None:
    plan = plan_decode(vae, shape, dtype=torch.bfloat16, device="cuda", budget_bytes=4 * GIB)
    assert plan.grid[longer] > 1 and plan.grid[1 - longer] == 1


def test_tiles_of_a_grid_have_one_size(vae: AutoencoderKLWan) -> None:
    plan = plan_decode(vae, HD, dtype=torch.bfloat16, device="cuda", grid=(2, 3))
    for tiles in (plan.rows, plan.columns):
        for index in range(len(tiles[0].stages)):
            assert len({b - a for a, b in (tile.stages[index].window for tile in tiles)}) == 1


def test_more_frames_need_no_more_memory(vae: AutoencoderKLWan) -> None:
    short, long = (
        plan_decode(vae, (1, 16, frames, 90, 160), dtype=torch.bfloat16, device="cuda", budget_bytes=2 * GIB)
        for frames in (21, 121)
    )
    assert short.grid == long.grid and short.predicted_bytes == long.predicted_bytes


@pytest.mark.parametrize("variant,channels", [("vae-2.1", 16), ("vae-2.2", 48)])
def test_floor(variant: str, channels: int) -> None:
    """The error names the floor, and the floor works."""
    model = meta_vae(variant)
    shape = (1, channels, 21, 90, 160)
    with pytest.raises(BudgetError, match=r"at least (\d+\.\d\d) GiB to decode") as caught:
        plan_decode(model, shape, dtype=torch.bfloat16, device="cuda", budget_bytes=GIB // 4)
    text = str(caught.value)
    assert f"{160 * (8 if channels == 16 else 16)}x{90 * (8 if channels == 16 else 16)}" in text
    floor = float(text.partition("at least ")[2].partition(" GiB")[0])
    plan = plan_decode(model, shape, dtype=torch.bfloat16, device="cuda", budget_bytes=int(floor * GIB))
    assert plan.predicted_bytes <= floor * GIB


def test_encode_budget(vae: AutoencoderKLWan) -> None:
    plan = plan_encode(vae, (1, 3, 81, 720, 1280), dtype=torch.bfloat16, device="cuda", budget_bytes=GIB)
    assert plan.predicted_bytes <= GIB and plan.tiles > 1
    with pytest.raises(BudgetError, match="to encode 1280x720"):
        plan_encode(vae, (1, 3, 81, 720, 1280), dtype=torch.bfloat16, device="cuda", budget_bytes=GIB // 8)


def test_balanced_cuts_give_equal_windows() -> None:
    cuts = balanced_cuts(1000, 3, (7, 7))
    assert cuts[0][0] == 0 and cuts[-1][1] == 1000
    windows = [min(b + 7, 1000) - max(a - 7, 0) for a, b in cuts]
    assert max(windows) - min(windows) <= 1


def test_refused(vae: AutoencoderKLWan) -> None:
    def decode(shape: tuple[int, ...], **options: object) -> None:
        plan_decode(vae, shape, dtype=torch.bfloat16, **options)

    with pytest.raises(TilingError, match=r"latent_invalid.*48.*\(B, 16, T, h, w\)"):
        decode((1, 48, 21, 44, 80))
    with pytest.raises(TilingError, match="latent_invalid"):
        decode((16, 21, 44, 80))
    with pytest.raises(TilingError, match=r"tile_invalid.*41 tiles"):
        decode((1, 16, 1, 5, 5), grid=(1, 41))
    with pytest.raises(TilingError, match=r"tile_invalid.*0 tiles"):
        decode((1, 16, 1, 5, 5), grid=(0, 1))
    with pytest.raises(TilingError, match=r"tile_invalid.*start"):
        decode((1, 16, 1, 5, 5), start=4)
    with pytest.raises(InputError, match=r"number_invalid.*chunk is 3"):
        decode((1, 16, 1, 5, 5), chunk=3)
    with pytest.raises(InputError, match=r"size_invalid.*multiples of 8"):
        plan_encode(vae, (1, 3, 5, 84, 80), dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"frames_invalid.*4n"):
        plan_encode(vae, (1, 3, 80, 80, 80), dtype=torch.bfloat16)
    with pytest.raises(InputError, match=r"image_invalid.*4"):
        plan_encode(vae, (1, 4, 81, 80, 80), dtype=torch.bfloat16)


@pytest.mark.parametrize("variant", ["vae-2.1", "vae-2.2"])
def test_every_size_length_and_budget_has_a_plan(variant: str) -> None:
    """One frame too, of which no change of length in time takes any: no combination ends in an error of Python's."""
    model, channels, scale = meta_vae(variant), *((16, 8) if variant == "vae-2.1" else (48, 16))
    sizes = [(1, 1), (2, 3), (22, 40), (45, 80), (68, 120)]
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        for (h, w), latent_frames, chunk, budget in product(sizes, (1, 2, 21), (None, 1, 4), (None, 2**20, GIB, 2**36)):
            options: dict[str, Any] = {
                "dtype": dtype,
                "device": device,
                "budget_bytes": budget,
                "chunk": chunk,
                "or_least": True,
            }
            decode = plan_decode(model, (1, channels, latent_frames, h, w), **options)
            encode = plan_encode(model, (1, 3, 4 * latent_frames - 3, h * scale, w * scale), **options)
            for plan in (decode, encode):
                assert min(dataclasses.astuple(plan.memory)[:4]) > 0 and plan.overhead > 0
