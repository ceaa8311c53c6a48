"""Exact tiled encode: tile after tile, each over all of time, then the rest on the whole frame."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from .adapters import describe
from .ops import WeightReader, module_weights
from .passes import BeforeStep, Setup, TileReport, device_of, first_alone, run_tiles, run_whole
from .runner import StageRunner, Workspace
from .spool import HOST_BYTES, Spool
from .tile_plan import TilePlan
from .windows import Interval, frames_between, time_step, whole_frame


@dataclass(frozen=True)
class EncodedVideo:
    """The distribution of the latents: `mean`, `logvar` (B,C,T,h,w), on the compute device, not normalized."""

    mean: torch.Tensor
    logvar: torch.Tensor
    report: TileReport


def encode(
    vae: Any,
    video: torch.Tensor,
    plan: TilePlan,
    *,
    device: torch.device | None = None,
    host_bytes: int = HOST_BYTES,
    spool_directory: Path | None = None,
    before_step: BeforeStep | None = None,
    read: WeightReader = module_weights,
) -> EncodedVideo:
    """Encodes `video`: the result of the untiled encode.

    Args:
        video: (B,C,F,H,W) in [-1, 1], any float dtype, on any device; on the host only the frames of one tile
            and step are on the compute device.
        device, host_bytes, spool_directory, before_step, read: as in `decode`.

    Raises:
        InputError image_invalid: other shape than planned, or values that are not finite.
        BudgetError, OutputError: as `decode`.
    """
    if tuple(video.shape) != plan.shape or plan.direction != "encode":
        raise InputError(
            "image_invalid",
            "encode",
            f"<video> has shape {tuple(video.shape)}; the plan is to {plan.direction} {plan.shape}",
            "Plan for this shape",
        )
    if not all(bool(torch.isfinite(frame).all()) for frame in video.unbind(2)):
        raise InputError("image_invalid", "encode", "<video> holds NaN or infinite values", "Give frames in [-1, 1]")
    model = describe(vae)
    target = device or device_of(model.encoder)
    work = _Encode(Setup(vae, model, plan, target, host_bytes, spool_directory, before_step, read))
    with torch.no_grad():
        mean, logvar = work.run(video).chunk(2, dim=1)
    return EncodedVideo(mean, logvar, work.report)


class _Encode:
    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.model, self.plan, self.device, self.settings = setup.model, setup.plan, setup.device, setup.settings
        self.tiled, self.whole = self.model.encoder[: self.plan.split], self.model.encoder[self.plan.split :]
        self.step = time_step(self.tiled)
        self.frames = frames_between(self.tiled, self.plan.shape[2])
        self.workspace: Workspace | None = None
        self.report = TileReport()
        self.item = 0
        self.finished: list[tuple[Interval, Interval]] = []

    def run(self, video: torch.Tensor) -> torch.Tensor:
        plan = self.plan
        items: list[torch.Tensor] = []
        for self.item in range(plan.shape[0]):
            self.finished = []
            with self.setup.spool() as features:
                plan = self._tiles(video, features, plan)
                items.append(self._rest(features))
                self.report.spooled_bytes += features.file_bytes
        return torch.cat(items)

    def _tiles(self, video: torch.Tensor, features: Spool, plan: TilePlan) -> TilePlan:
        plan = run_tiles(
            self.setup.vae,
            plan,
            lambda grid, row, column: self._tile(video, features, grid, row, column),
            self._release,
            self.report,
        )
        self._release()
        return plan

    def _rest(self, features: Spool) -> torch.Tensor:
        row, column = self._frame_size()
        results: list[torch.Tensor] = []

        def run(query_rows: int) -> None:
            results[:] = [self._whole(features, query_rows)]

        run_whole(self.plan, run, row * column)
        return results[0]

    def _frame_size(self) -> tuple[int, int]:
        """Positions of the whole-frame part's input."""
        patch = self.model.patch
        row, column = whole_frame(self.tiled, self.plan.shape[3] // patch, self.plan.shape[4] // patch)
        return row.core[1], column.core[1]

    def _release(self) -> None:
        self.workspace = None

    def _tile(self, video: torch.Tensor, features: Spool, plan: TilePlan, row: int, column: int) -> None:
        if self.workspace is None:
            self.workspace = Workspace.for_tiles(
                self.tiled, plan.rows, plan.columns, plan.chunk, plan.dtype, self.device
            )
        rows, columns = plan.rows[row], plan.columns[column]
        runner = StageRunner(self.tiled, rows, columns, self.workspace, self.settings)
        patch, frames = self.model.patch, plan.shape[2]
        top, bottom = (edge * patch for edge in rows.stages[0].window)
        left, right = (edge * patch for edge in columns.stages[0].window)
        count = 0
        for start, end in first_alone(frames, self.step):
            self.setup.announce(self.item, (row, column), start, frames)
            part = video[self.item : self.item + 1, :, start:end, top:bottom, left:right]
            pixels = _patches(part.to(device=self.device, dtype=plan.dtype), patch)
            for frame in runner.encode(pixels)[0].unbind(1):
                features.store((rows.core, columns.core, count), frame)
                count += 1
        self.finished.append((rows.core, columns.core))

    def _whole(self, features: Spool, query_rows: int) -> torch.Tensor:
        """The rest of the encoder, one latent frame at a time."""
        height, width = self._frame_size()
        row, column = whole_frame(self.whole, height, width)
        workspace = Workspace.for_tiles(self.whole, [row], [column], self.plan.chunk, self.plan.dtype, self.device)
        runner = StageRunner(self.whole, row, column, workspace, self.settings)
        runner.query_rows = query_rows
        channels = self.whole[0].inputs
        results: list[torch.Tensor] = []
        for frame in range(self.frames):
            self.setup.announce(self.item, None, frame, self.frames)
            x = torch.empty(1, channels, 1, height, width, dtype=self.plan.dtype, device=self.device)
            for rows, columns in self.finished:
                shape = (channels, rows[1] - rows[0], columns[1] - columns[0])
                part = torch.empty(shape, dtype=self.plan.dtype, device=self.device)
                features.load((rows, columns, frame), part)
                x[0, :, 0, slice(*rows), slice(*columns)].copy_(part)
            results.append(runner.encode(x))
        return torch.cat(results, dim=2)


def _patches(x: torch.Tensor, patch: int) -> torch.Tensor:
    """(1, c, n, h*p, w*p) to (1, c*p*p, n, h, w).

    Source: diffusers models/autoencoders/autoencoder_kl_wan.py (`patchify`), Apache-2.0.
    """
    if patch == 1:
        return x
    _, channels, frames, height, width = x.shape
    x = x.reshape(1, channels, frames, height // patch, patch, width // patch, patch)
    x = x.permute(0, 1, 6, 4, 2, 3, 5)
    return x.reshape(1, channels * patch**2, frames, height // patch, width // patch)
