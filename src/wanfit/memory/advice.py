"""What would fit: the nearest settings, and the largest official ones."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from .machine import Machine
from .parts import Model
from .plan import Options, Plan, denoising_fits, make_plan, video_of
from .tiles import vae_fits

Prefer = Literal["size", "length"]

_SHORTEST = 17
"""Frames: about one second. A shorter video is no nearest setting."""

_SMALLEST_SIDE = 240


@dataclass(frozen=True)
class Settings:
    """Settings that fit, with their plan."""

    width: int
    height: int
    num_frames: int
    plan: Plan

    def describe(self) -> str:
        return f"{self.width}x{self.height}, {self.num_frames} frames"


@dataclass(frozen=True)
class Search:
    """What stays the same while sizes and lengths are tried."""

    model: Model
    machine: Machine
    options: Options = field(default_factory=Options)

    def fitting(self, width: int, height: int, num_frames: int) -> Settings | None:
        """With its plan, where it fits."""
        if not self._denoising_fits(width, height, num_frames):
            return None
        plan = make_plan(self.model, self.machine, width, height, num_frames, self.options)
        return Settings(width, height, num_frames, plan) if plan.fits else None

    def _denoising_fits(self, width: int, height: int, num_frames: int) -> bool:
        video = video_of(self.model, width, height, num_frames, self.options)
        return denoising_fits(self.model, self.machine, video, self.options)

    def _vae_fits(self, width: int, height: int, num_frames: int) -> bool:
        return vae_fits(self.model, self.machine, video_of(self.model, width, height, num_frames, self.options))

    def first(self, candidates: Sequence[tuple[int, int, int]]) -> Settings | None:
        """The first of `candidates` that fits; what is needed only gets less along them, so the range is halved: by
        the denoising, which is soon told, then by the smallest tiles of the VAE."""
        for fits in (self._denoising_fits, self._vae_fits):
            if candidates and not fits(*candidates[0]):
                candidates = candidates[bisect_left(candidates, True, key=lambda size: fits(*size)) :]
        return next((found for size in candidates if (found := self.fitting(*size)) is not None), None)

    def longest(self, width: int, height: int, num_frames: int) -> Settings | None:
        lengths = range(num_frames, _SHORTEST - 1, -4) or [num_frames]
        return self.first([(width, height, frames) for frames in lengths])

    def largest(self, width: int, height: int, num_frames: int) -> Settings | None:
        sizes = _scaled(width, height, self.model.variant.size_multiple)
        return self.first([(*size, num_frames) for size in sizes])


def nearest(search: Search, width: int, height: int, num_frames: int, prefer: Prefer = "size") -> list[Settings]:
    """Settings below the given ones that fit, the preferred way first; empty when nothing of use does.

    Args:
        prefer: `size` shortens the video and makes it smaller only when that is not enough; `length` the other way.

    Returns: up to two: less length at this size, less size at this length, or where neither is enough less of both.
    """
    shorter = search.longest(width, height, num_frames)
    smaller = search.largest(width, height, num_frames)
    if shorter is None and smaller is None:
        both = search.largest(width, height, min(num_frames, _SHORTEST))
        if both is None:
            return []
        return [search.longest(both.width, both.height, num_frames) or both]
    ways = [shorter, smaller] if prefer == "size" else [smaller, shorter]
    return [way for way in ways if way is not None]


def largest_official(
    search: Search, *, portrait: bool = False, num_frames: int | None = None, prefer: Prefer = "size"
) -> Settings | None:
    """The largest size of an official shape, and the longest official length, that fit; None: nothing of use does.

    Args:
        num_frames: wanted; None for the model's official length.
        prefer: what is kept when the largest official size does not fit at full length.
    """
    variant = search.model.variant
    frames = variant.num_frames if num_frames is None else num_frames
    sizes = sorted((s for s in variant.sizes if (s[1] > s[0]) == portrait), key=lambda s: -s[0] * s[1])
    for width, height in sizes:
        whole = search.fitting(width, height, frames)
        if whole is not None:
            return whole
        if prefer == "size":
            shorter = search.longest(width, height, frames)
            if shorter is not None:
                return shorter
    found = nearest(search, *sizes[-1], frames, prefer)
    return found[0] if found else None


def _scaled(width: int, height: int, multiple: int) -> Iterator[tuple[int, int]]:
    """Smaller sizes of nearly the same shape, largest first: both sides go down with the longer one."""
    long, short = max(width, height), min(width, height)
    for side in range(long - multiple, 0, -multiple):
        other = round(side * short / long / multiple) * multiple
        if min(side, other) < min(_SMALLEST_SIDE, short):
            return
        yield (side, other) if width >= height else (other, side)
