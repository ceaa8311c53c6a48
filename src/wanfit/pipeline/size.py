"""`auto`: the largest size and length that fit, before a run begins."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..memory.advice import Search, Settings, largest_official
from ..memory.plan import Options
from ..memory.record import gib
from ..memory.verdict import room_of
from .images import load_image, size_for_image
from .request import Request, default_size
from .resume import kept_facts


def decide_size(request: Request, search: Search, resume: Path | None = None) -> tuple[Request, str]:
    """The request with numbers for what is `auto`, and a line that says which and why.

    An image that is upright makes the video so. A size that is given stays as it is, and so does the length with
    `prefer` length.

    Args:
        resume: of a run that was broken off: what was decided then holds, whatever is free now.
    Raises:
        CheckpointError: as `kept_facts`. InputError: an image that cannot be read.
    """
    automatic = request.automatic
    if resume is not None:
        facts = kept_facts(resume)
        known = {name: int(facts[name]) for name in automatic if facts.get(name, "").isdigit()}
        return replace(request, **known), "size: as in the run that is resumed"
    variant = search.model.variant
    wanted = request.num_frames if isinstance(request.num_frames, int) else variant.num_frames
    picture = None if request.image is None or not variant.takes_image else load_image(request.image, "image")[0]
    width, height = default_size(variant)
    found: Settings | None
    if "width" in automatic:
        upright = request.portrait or (picture is not None and picture.height > picture.width)
        found = largest_official(search, portrait=upright, num_frames=wanted, prefer=request.prefer)
    else:
        if isinstance(request.width, int) and isinstance(request.height, int):
            width, height = request.width, request.height
        elif picture is not None:
            width, height = size_for_image(picture, width * height, variant.size_multiple)
        found = search.longest(width, height, wanted)
    if found is None:  # the plan of the run says what is missing
        return replace(request, width=width, height=height, num_frames=wanted), "size: nothing of use fits"
    machine = search.machine
    kind, reserve = ("VRAM", machine.vram_taken.get("reserve", 0)) if machine.device == "cuda" else ("RAM", 0)
    beside = f", beside {gib(reserve)} that are left alone" if reserve else ""
    said = (
        f"size: {found.describe()}, the most that fits {gib(room_of(machine))} of {kind}{beside} ({found.plan.verdict})"
    )
    return replace(request, width=found.width, height=found.height, num_frames=found.num_frames), said


def options_for_size(request: Request, chunk_tokens: int, loras: tuple[int, int]) -> Options:
    """What is known of a run before its size is: the longest prompt and guidance are counted."""
    return Options(image=request.image is not None, chunk_tokens=chunk_tokens, loras=loras)
