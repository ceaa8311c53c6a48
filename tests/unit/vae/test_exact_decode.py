"""The tiled decode against diffusers' own untiled decode of the same VAE.

float32: 1e-6 on a range of 2, with oneDNN off, so that frame and tiles use one convolution algorithm: what is left is
the order of additions. With oneDNN on, as by default, the algorithm and its order of additions depend on the size of
the input: 2e-6, and no further from the float64 result than the untiled decode. float64: 1e-12, which leaves no room
for a wrong halo. All 16 grids for every size: `dev.py bench vae --exact`.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from wan_vaes import GRIDS, VARIANTS, Z, cut_at_full_resolution, random_vae, untiled_decode

from wanfit.vae import HostFrames, decode, plan_decode
from wanfit.vae.tile_plan import TilePlan
from wanfit.vae.windows import AxisWindow

SHAPES = ((1, 5, 7), (2, 5, 3), (3, 3, 4), (4, 3, 3), (5, 3, 3))


def difference(vae: object, latents: torch.Tensor, plan: TilePlan, expected: torch.Tensor) -> float:
    sink = HostFrames(torch.float32)
    report = decode(vae, latents, plan, sink)
    assert report.tiles == plan.tiles * latents.shape[0] and report.grids == [plan.grid]
    assert sink.video.shape == expected.shape
    return (sink.video.double() - expected.double()).abs().max().item()


@pytest.fixture
def one_algorithm():
    with torch.backends.mkldnn.flags(enabled=False):
        yield


@pytest.fixture
def one_thread():
    """With more, the order of additions depends on how oneDNN splits up an input."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_algorithm")
@pytest.mark.filterwarnings("ignore:TF32 acceleration")
@pytest.mark.parametrize("frames,height,width", SHAPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_all_grids(variant: str, frames: int, height: int, width: int) -> None:
    vae = random_vae(variant)
    latents = torch.randn(1, Z, frames, height, width)
    expected = untiled_decode(vae, latents)
    assert expected.abs().max() > 0.2
    for number, grid in enumerate(GRIDS):
        if frames > 2 and grid != (4, 4) and number % 3 != frames - 3:
            continue
        plan = plan_decode(vae, latents.shape, dtype=torch.float32, grid=grid, start=number % 3)
        assert plan.grid == grid
        assert cut_at_full_resolution(plan, (height * 8, width * 8))
        assert difference(vae, latents, plan, expected) <= 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_with_onednn(variant: str) -> None:
    vae, exact = random_vae(variant), random_vae(variant, dtype=torch.float64)
    exact.load_state_dict({name: weight.double() for name, weight in vae.state_dict().items()})
    latents = torch.randn(1, Z, 3, 5, 6)
    plan = plan_decode(vae, latents.shape, dtype=torch.float32, grid=(3, 4))
    untiled, truth = untiled_decode(vae, latents), untiled_decode(exact, latents.double())
    assert difference(vae, latents, plan, untiled) <= 2e-6
    sink = HostFrames()
    decode(vae, latents, plan, sink)
    own, others = ((video - truth).square().mean().sqrt() for video in (sink.video, untiled))
    assert own <= 1.05 * others


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("variant", VARIANTS)
def test_one_tile_is_identical(variant: str) -> None:
    vae = random_vae(variant)
    latents = torch.randn(1, Z, 3, 5, 7)
    plan = plan_decode(vae, latents.shape, dtype=torch.float32)
    assert difference(vae, latents, plan, untiled_decode(vae, latents)) == 0.0


@pytest.mark.parametrize(
    "chunk,channels_last,fold_time",
    [(1, False, False), (2, False, False), (4, False, False), (2, True, False), (1, False, True)],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_float64_however_it_is_run(variant: str, chunk: int, channels_last: bool, fold_time: bool) -> None:
    vae = random_vae(variant, dtype=torch.float64)
    latents = torch.randn(1 + (chunk == 4), Z, 2, 6, 9, dtype=torch.float64)
    plan = plan_decode(vae, latents.shape, dtype=torch.float64, grid=(2, 3), chunk=chunk, channels_last=channels_last)
    plan = dataclasses.replace(plan, fold_time=fold_time)
    sink = _Doubles()
    decode(vae, latents, plan, sink)
    assert (sink.video - untiled_decode(vae, latents)).abs().max() <= 1e-12


@pytest.mark.parametrize("start", [0, 1, 2, 3])
def test_float64_wherever_the_tiling_starts(start: int) -> None:
    vae = random_vae("vae-2.1", dtype=torch.float64)
    latents = torch.randn(1, Z, 2, 9, 7, dtype=torch.float64)
    plan = plan_decode(vae, latents.shape, dtype=torch.float64, grid=(3, 2), start=start)
    assert plan.split == start + 1
    sink = _Doubles()
    decode(vae, latents, plan, sink)
    assert (sink.video - untiled_decode(vae, latents)).abs().max() <= 1e-12


@pytest.mark.parametrize("variant", VARIANTS)
def test_halo_of_one_less_is_seen(variant: str) -> None:
    """Every stage's window is as small as it can be: without one column of it the result changes."""
    vae = random_vae(variant, dtype=torch.float64)
    latents = torch.randn(1, Z, 2, 3, 24, dtype=torch.float64)
    expected = untiled_decode(vae, latents)
    plan = plan_decode(vae, latents.shape, dtype=torch.float64, grid=(1, 2), start=1)
    left = plan.columns[0]
    sizes = [48 * 2**index for index in range(len(left.stages))]
    for index, (stage, size) in enumerate(zip(left.stages, sizes, strict=True)):
        start, end = stage.window
        assert end < size
        narrow = dataclasses.replace(stage, window=(start, end - 1))
        if stage.resampled == stage.window:
            narrow = AxisWindow(narrow.window, narrow.window, narrow.window)
        stages = (*left.stages[:index], narrow, *left.stages[index + 1 :])
        short = dataclasses.replace(plan, columns=(dataclasses.replace(left, stages=stages), *plan.columns[1:]))
        sink = _Doubles()
        decode(vae, latents, short, sink)
        assert (sink.video - expected).abs().max() > 1e-9


class _Doubles(HostFrames):
    """Keeps float64, which is no format for frames but shows exactness."""

    def __init__(self) -> None:
        super().__init__(torch.float32)
        object.__setattr__(self._format, "dtype", torch.float64)
