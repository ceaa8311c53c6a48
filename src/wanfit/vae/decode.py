"""Exact tiled decode: the whole-frame part first, then tile after tile, each over all of time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import TilingError
from .adapters import describe
from .download import Download
from .ops import WeightReader, module_weights
from .passes import BeforeStep, Setup, TileReport, device_of, first_alone, run_tiles, run_whole
from .runner import StageRunner, Workspace
from .sinks import FrameSink, Rect
from .spool import HOST_BYTES, Spool
from .tile_plan import TilePlan
from .windows import decoded_size, frames_between, whole_frame


def decode(
    vae: Any,
    latents: torch.Tensor,
    plan: TilePlan,
    sink: FrameSink,
    *,
    device: torch.device | None = None,
    host_bytes: int = HOST_BYTES,
    spool_directory: Path | None = None,
    before_step: BeforeStep | None = None,
    read: WeightReader = module_weights,
) -> TileReport:
    """Decodes `latents` into `sink`: the pixels of the untiled decode, clamped to [-1, 1].

    Args:
        vae: diffusers' `AutoencoderKLWan` or ComfyUI's `WanVAE`, on the compute device, in `plan.dtype`.
        latents: (B,C,T,h,w), denormalized, on any device.
        device: to compute on; by default where the weights are.
        host_bytes: host memory for the features between the two parts; what is more waits in a temporary file
            in `spool_directory`.
        before_step: see `BeforeStep`.
        read: gives the weights of a convolution, for hosts that keep them elsewhere.

    Raises:
        TilingError latent_invalid: other shape than planned, or values that are not finite.
        BudgetError budget_exceeded: out of memory with the tightest grid.
        OutputError output_unwritable: the temporary file cannot be written.
    Memory: `plan.memory`, whatever the number of frames.
    """
    if tuple(latents.shape) != plan.shape or plan.direction != "decode":
        raise TilingError(
            "latent_invalid",
            "decode",
            f"<latents> has shape {tuple(latents.shape)}; the plan is to {plan.direction} {plan.shape}",
            "Plan for this shape",
        )
    if not bool(torch.isfinite(latents).all()):
        raise TilingError(
            "latent_invalid",
            "decode",
            "<latents> holds NaN or infinite values",
            "Look at the sampling before it: a 16-bit overflow or a wrong model file",
        )
    model = describe(vae)
    target = device or device_of(model.decoder)
    work = _Decode(Setup(vae, model, plan, target, host_bytes, spool_directory, before_step, read), sink)
    with torch.no_grad():
        return work.run(latents)


class _Decode:
    def __init__(self, setup: Setup, sink: FrameSink) -> None:
        self.setup, self.sink = setup, sink
        self.model, self.plan, self.device, self.settings = setup.model, setup.plan, setup.device, setup.settings
        self.whole, self.tiled = self.model.decoder[: self.plan.split], self.model.decoder[self.plan.split :]
        self.frames = frames_between(self.whole, self.plan.shape[2])
        self.buffers: tuple[Workspace, torch.Tensor] | None = None
        self.report = TileReport()
        self.item = 0

    def run(self, latents: torch.Tensor) -> TileReport:
        batch, _, _, height, width = self.plan.shape
        self.sink.begin(batch, *decoded_size(self.model, self.plan.shape), self.model.channels)
        plan = self.plan
        for self.item in range(batch):
            with self.setup.spool() as features:
                run_whole(plan, lambda rows: self._whole(latents, features, rows), height * width)
                plan = run_tiles(
                    self.setup.vae,
                    plan,
                    lambda grid, row, column: self._tile(features, grid, row, column),
                    self._release,
                    self.report,
                )
                self._release()
                self.report.spooled_bytes += features.file_bytes
        return self.report

    def _whole(self, latents: torch.Tensor, features: Spool, query_rows: int) -> None:
        """Everything before the tiles, one latent frame at a time, into `features`."""
        _, _, frames, height, width = self.plan.shape
        row, column = whole_frame(self.whole, height, width)
        workspace = Workspace.for_tiles(self.whole, [row], [column], self.plan.chunk, self.plan.dtype, self.device)
        runner = StageRunner(self.whole, row, column, workspace, self.settings)
        runner.query_rows = query_rows
        count = 0

        def emit(x: torch.Tensor) -> None:
            nonlocal count
            for frame in x[0].unbind(1):
                features.store(count, frame)
                count += 1

        for frame in range(frames):
            self.setup.announce(self.item, None, frame, frames)
            step = latents[self.item : self.item + 1, :, frame : frame + 1]
            runner.decode(step.to(device=self.device, dtype=self.plan.dtype), emit)

    def _tile(self, features: Spool, plan: TilePlan, row: int, column: int) -> None:
        workspace, staging = self._buffers(plan)
        rows, columns = plan.rows[row], plan.columns[column]
        runner = StageRunner(self.tiled, rows, columns, workspace, self.settings)
        window = rows.stages[0].window, columns.stages[0].window
        download = Download(lambda pixels, number: self.sink.write(number, pixels))
        patch = self.model.patch
        top, bottom = (edge * patch for edge in rows.core)
        left, right = (edge * patch for edge in columns.core)
        self.sink.begin_tile(self.item, Rect(top, left, bottom - top, right - left))
        count = 0
        complete = False

        def emit(x: torch.Tensor) -> None:
            nonlocal count
            pixels = _pixels(x.clamp(-1, 1), patch)
            download.put(self.sink.format.convert(pixels), count)
            count += x.shape[2]

        try:
            for start, end in first_alone(self.frames, plan.chunk):
                self.setup.announce(self.item, (row, column), start, self.frames)
                for place, number in zip(staging, range(start, end), strict=False):
                    features.load(number, place)
                x = staging[: end - start, :, slice(*window[0]), slice(*window[1])]
                runner.decode(x.transpose(0, 1)[None], emit)
            download.flush()
            complete = True
        finally:
            self.sink.end_tile(complete=complete)

    def _buffers(self, plan: TilePlan) -> tuple[Workspace, torch.Tensor]:
        """The buffers that all tiles of a grid share."""
        if self.buffers is None:
            workspace = Workspace.for_tiles(self.tiled, plan.rows, plan.columns, plan.chunk, plan.dtype, self.device)
            row, column = whole_frame(self.whole, *plan.shape[3:])
            shape = (plan.chunk, self.tiled[0].inputs, row.core[1], column.core[1])
            self.buffers = workspace, torch.empty(shape, dtype=plan.dtype, device=self.device)
        return self.buffers

    def _release(self) -> None:
        self.buffers = None


def _pixels(x: torch.Tensor, patch: int) -> torch.Tensor:
    """(1, c*p*p, n, h, w) to (1, c, n, h*p, w*p).

    Source: diffusers models/autoencoders/autoencoder_kl_wan.py (`unpatchify`), Apache-2.0.
    """
    if patch == 1:
        return x
    _, channels, frames, height, width = x.shape
    x = x.reshape(1, channels // patch**2, patch, patch, frames, height, width)
    return x.permute(0, 1, 4, 5, 3, 6, 2).reshape(1, -1, frames, height * patch, width * patch)
