"""VAE decode (and encode): time, peak and error of WanFit against diffusers, random weights at real width.

    python scripts/dev.py bench vae --device cuda --dtype bfloat16 --case 480p,720p --json

One JSON line a run. `max_abs_diff`, `mean_abs_diff`: against the untiled run of diffusers in the same dtype, on a
range of 2 (null when that runs out of memory). With --truth also `mean_abs_error`, against an untiled float32 run:
the error of the 16-bit arithmetic itself. Time: wall clock of one run after a short one, frames on the host at the
end (WanFit) or on the device (diffusers). Peak and reserved: PyTorch's allocator, the half of the VAE that runs
included; null on the CPU.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import torch
from diffusers import AutoencoderKLWan
from vae_comfy import comfy_tiled
from vae_exact import sweep
from vae_measure import Differences, measure, write_video
from vae_sheet import draw

from wanfit.errors import WanFitError
from wanfit.vae import (
    HostFrames,
    TilePlan,
    decode,
    diffusers_config,
    encode,
    plan_decode,
    plan_encode,
)

GIB = 1024**3


@dataclass(frozen=True)
class Case:
    variant: str
    latents: tuple[int, int, int]
    budgets: tuple[float, ...]
    to_file: bool = False


CASES = {
    "480p": Case("vae-2.1", (21, 60, 104), (1.0, 2.0)),
    "720p": Case("vae-2.1", (21, 90, 160), (2.0, 4.0)),
    "1088p": Case("vae-2.1", (21, 136, 240), (3.0, 6.0)),
    "720p-481f": Case("vae-2.1", (121, 90, 160), (2.0,), to_file=True),
    "2.2": Case("vae-2.2", (31, 44, 80), (2.0, 3.0, 4.0)),
}
QUICK = {
    "480p": (3, 8, 10),
    "720p": (2, 9, 12),
    "1088p": (2, 10, 14),
    "720p-481f": (6, 6, 8),
    "2.2": (2, 6, 8),
}


def make_vae(variant: str, device: str, dtype: torch.dtype, quick: bool) -> AutoencoderKLWan:
    torch.manual_seed(0)
    narrow = {"base_dim": 16, "decoder_base_dim": 16} if quick else {}
    with torch.device(device):
        vae = AutoencoderKLWan(**diffusers_config(variant, **narrow)).eval()
        for name, parameter in vae.named_parameters():
            if "gamma" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
            parameter.data = parameter.data.to(dtype)
    return vae


def keep_half(vae: AutoencoderKLWan, half: str, device: str) -> None:
    """Only the encoder or only the decoder on the device."""
    for name, module in vae.named_children():
        module.to(device if (name in ("encoder", "quant_conv")) == (half == "encode") else "cpu")


def plan_fields(plan: TilePlan) -> dict[str, Any]:
    return {
        "tiles": plan.tiles,
        "grid": list(plan.grid),
        "split": plan.split,
        "chunk": plan.chunk,
        "channels_last": plan.channels_last,
        "overhead": round(plan.overhead, 3),
        "predicted_bytes": plan.predicted_bytes,
        "feature_bytes": plan.feature_bytes,
    }


class Bench:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device: str = options.device
        self.dtype: torch.dtype = getattr(torch, options.dtype)

    def emit(self, case: str, method: str, **fields: Any) -> None:
        if self.options.json:
            print(json.dumps({"case": case, "method": method, **fields}), flush=True)
            return
        shown = {
            key: round(value / GIB, 3) if key.endswith("_bytes") and value else value for key, value in fields.items()
        }
        print(f"{case:10} {method:18} " + "  ".join(f"{key} {value}" for key, value in shown.items()), flush=True)

    def run(self, name: str) -> None:
        case = CASES[name]
        size = QUICK[name] if self.options.quick else case.latents
        vae = make_vae(case.variant, self.device, self.dtype, self.options.quick)
        latents = torch.randn(1, vae.config.z_dim, *size)
        if case.to_file:
            keep_half(vae, "decode", self.device)
            self.into_file(name, case, vae, latents)
            return
        if self.options.encode:
            keep_half(vae, "encode", self.device)
            self.encode(name, case, vae, size)
            return
        keep_half(vae, "decode", self.device)
        self.decode(name, case, vae, latents)

    def budgets(self, case: Case) -> list[int | None]:
        if self.options.budget_gib:
            return [int(float(value) * GIB) for value in self.options.budget_gib.split(",")]
        return [None] if self.options.quick else [int(value * GIB) for value in case.budgets]

    @torch.no_grad()
    def decode(self, name: str, case: Case, vae: AutoencoderKLWan, latents: torch.Tensor) -> None:
        on_device = latents.to(self.device, self.dtype)
        vae.decode(on_device[:, :, :2])
        truth = None
        if self.options.truth:
            exact = make_vae(case.variant, self.device, torch.float32, self.options.quick)
            video, _ = measure(self.device, lambda: exact.decode(on_device.float()).sample)
            truth = None if video is None else video.cpu()
            del exact, video
        video, figures = measure(self.device, lambda: vae.decode(on_device).sample)
        reference = None if video is None else video.cpu()
        del video
        differences = Differences(reference, truth)
        self.emit(name, "diffusers", **figures, **differences.of(reference))
        if not self.options.no_tiling:
            vae.enable_tiling(*((64, 64, 48, 48) if self.options.quick else ()))
            video, figures = measure(self.device, lambda: vae.decode(on_device).sample)
            vae.disable_tiling()
            self.emit(name, "diffusers tiling", **figures, **differences.of(None if video is None else video.cpu()))
            del video
        if self.options.comfy:
            size = (64, 16) if self.options.quick else (256, 64)
            numbers = {"device": self.device, "tile": size[0], "overlap": size[1]}
            _, figures = comfy_tiled(self.options.comfy, case.variant, vae, latents, **numbers)
            self.emit(name, "ComfyUI tiling", **figures)
        for budget in self.budgets(case):
            for chunk in self.options.chunk:
                for last in (None, False) if self.options.channels_first else (None,):
                    self.ours(name, vae, latents, budget, chunk, last, differences)
        if self.options.quick:
            self.ours(name, vae, latents, None, 2, None, differences, grid=(2, 3))

    def ours(
        self,
        name: str,
        vae: AutoencoderKLWan,
        latents: torch.Tensor,
        budget: int | None,
        chunk: int | None,
        last: bool | None,
        differences: Differences,
        grid: tuple[int, int] | None = None,
    ) -> None:
        try:
            plan = plan_decode(
                vae,
                latents.shape,
                dtype=self.dtype,
                device=self.device,
                budget_bytes=budget,
                grid=grid,
                chunk=chunk,
                channels_last=last,
                start=self.options.start,
            )
        except WanFitError as error:
            self.emit(name, "wanfit", budget_bytes=budget, chunk=chunk, error=str(error))
            return
        short = latents[:, :, :2]
        small = plan_decode(
            vae, short.shape, dtype=self.dtype, device=self.device, grid=plan.grid, start=plan.split - 1,
            chunk=plan.chunk, channels_last=last,
        )  # fmt: skip
        device = torch.device(self.device)
        decode(vae, short, small, HostFrames(torch.float16), device=device)
        sink = HostFrames(torch.float16 if self.dtype.itemsize == 2 else torch.float32)
        _, figures = measure(self.device, lambda: decode(vae, latents, plan, sink, device=device))
        gaps = differences.of(None if "error" in figures else sink.video)
        self.emit(name, "wanfit", budget_bytes=budget, **plan_fields(plan), **figures, **gaps)

    @torch.no_grad()
    def encode(self, name: str, case: Case, vae: AutoencoderKLWan, size: tuple[int, int, int]) -> None:
        frames, height, width = size
        scale = vae.config.scale_factor_spatial
        video = torch.rand(1, 3, 1 + (frames - 1) * 4, height * scale, width * scale) * 2 - 1
        on_device = [video.to(self.device, self.dtype)]
        vae.encode(on_device[0][:, :, :5])
        result, figures = measure(self.device, lambda: vae.encode(on_device[0]).latent_dist.mean)
        reference = None if result is None else result.cpu()
        del result
        on_device.clear()
        differences = Differences(reference, None)
        self.emit(name, "diffusers encode", **figures)
        for budget in self.budgets(case):
            for chunk in self.options.chunk:
                plan = plan_encode(
                    vae, video.shape, dtype=self.dtype, device=self.device, budget_bytes=budget, chunk=chunk
                )
                device = torch.device(self.device)
                short = video[:, :, :9]
                small = plan_encode(
                    vae, short.shape, dtype=self.dtype, device=self.device, grid=plan.grid, chunk=plan.chunk
                )
                encode(vae, short, small, device=device)
                encoded, figures = measure(self.device, lambda: encode(vae, video, plan, device=device))  # noqa: B023
                mean = None if encoded is None else encoded.mean.cpu()
                gaps = differences.of(mean)
                self.emit(name, "wanfit encode", budget_bytes=budget, **plan_fields(plan), **figures, **gaps)

    def into_file(self, name: str, case: Case, vae: AutoencoderKLWan, latents: torch.Tensor) -> None:
        """81 and 481 frames into an MP4, one plan: the peak must not grow. Time: the encoder's included."""
        budget = self.budgets(case)[0]
        for frames in (2, latents.shape[2]) if self.options.quick else (2, 21, latents.shape[2]):
            part = latents[:, :, :frames]
            plan = plan_decode(
                vae,
                part.shape,
                dtype=self.dtype,
                device=self.device,
                budget_bytes=budget,
                grid=(2, 2) if self.options.quick else None,
                start=0,
                chunk=self.options.chunk[0],
            )
            with tempfile.TemporaryDirectory() as folder:
                figures = write_video(Path(folder) / "video.mp4", vae, part, plan, self.device)
            self.emit(name, f"wanfit {1 + (frames - 1) * 4}f", budget_bytes=budget, **plan_fields(plan), **figures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, choices=("float32", "float16", "bfloat16"))
    parser.add_argument("--case", default=",".join(CASES), help="comma-separated: " + ", ".join(CASES))
    parser.add_argument("--budget-gib", help="comma-separated, instead of each case's own")
    parser.add_argument(
        "--chunk",
        default=[None],
        type=lambda text: [int(part) for part in text.split(",")],
        help="frames at a time, comma-separated (default: as planned)",
    )
    parser.add_argument("--start", type=int, help="up blocks on the whole frame")
    parser.add_argument("--channels-first", action="store_true", help="run that layout too")
    parser.add_argument("--no-tiling", action="store_true", help="leave out diffusers' own tiling")
    parser.add_argument("--truth", action="store_true", help="compare with float32 too")
    parser.add_argument("--encode", action="store_true", help="encode instead of decode")
    parser.add_argument(
        "--exact", action="store_true", help="instead: every grid against the untiled pass, float32, CPU"
    )
    parser.add_argument("--sheet", type=Path, help="instead: a PNG of where tiled decodes differ, small random VAEs")
    parser.add_argument("--comfy", type=Path, help="a ComfyUI source tree: its tiled decode as a peer")
    parser.add_argument("--no-onednn", action="store_true", help="CPU: one convolution algorithm whatever the size")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small sizes and widths")
    options = parser.parse_args()
    options.dtype = options.dtype or ("float32" if options.device == "cpu" else "bfloat16")
    torch.backends.mkldnn.enabled = not options.no_onednn
    names = options.case.split(",")
    if unknown := [name for name in names if name not in CASES]:
        parser.error(f"unknown case {', '.join(unknown)}; known: {', '.join(CASES)}")
    bench = Bench(options)
    small = functools.partial(make_vae, device="cpu", dtype=torch.float32, quick=True)
    if options.exact:
        sweep(small, bench.emit)
    if options.sheet:
        draw(small, options.sheet, options.comfy)
    if options.exact or options.sheet:
        return
    for name in names:
        bench.run(name)


if __name__ == "__main__":
    main()
