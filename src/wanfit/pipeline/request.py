"""What the user asks for, checked before anything is read, and completed with the model's official defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from PIL import Image

from ..checkpoint import Identity, Variant
from ..errors import InputError
from ..memory.advice import Prefer
from .images import fit_image, load_image, size_for_image
from .loras import LoraChoice, check_loras
from .sampling import SAMPLERS, count_high_steps

AUTO: Final = "auto"
MAX_ROPE_POSITIONS = 1024
DEFAULT_NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，"
    "丑陋的，残缺的，多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，"
    "杂乱的背景，三条腿，背景人很多，倒着走"
)


@dataclass(frozen=True)
class Request:
    """What one video shall be. None means: the official default of the model at hand.

    Args:
        width, height, num_frames: `auto`: the most that fits, see `size.decide_size`; `portrait` and `prefer` say how.
    """

    prompt: str
    out: Path
    negative_prompt: str = DEFAULT_NEGATIVE
    image: Path | None = None
    last_image: Path | None = None
    width: int | Literal["auto"] | None = None
    height: int | Literal["auto"] | None = None
    num_frames: int | Literal["auto"] | None = None
    portrait: bool = False
    prefer: Prefer = "size"
    steps: int | None = None
    seed: int = 0
    sampler: str = "unipc"
    shift: float | None = None
    boundary_ratio: float | None = None
    guidance_scale: float | None = None
    guidance_scale_2: float | None = None
    fps: int | None = None
    loras: tuple[LoraChoice, ...] = ()

    @property
    def automatic(self) -> list[str]:
        """The names of what is `auto`."""
        return [name for name in ("width", "height", "num_frames") if getattr(self, name) == AUTO]


@dataclass(frozen=True)
class Settings:
    """A request with every value decided. `high_steps` of `steps` go to the high-noise expert."""

    prompt: str
    negative_prompt: str
    out: Path
    image: Image.Image | None
    last_image: Image.Image | None
    width: int
    height: int
    num_frames: int
    steps: int
    high_steps: int
    seed: int
    sampler: str
    shift: float
    boundary_ratio: float | None
    guidance_scale: float
    guidance_scale_2: float
    fps: int
    size_multiple: int
    notices: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """Tokens of one forward."""
        frames = (self.num_frames - 1) // 4 + 1
        return frames * (self.width // self.size_multiple) * (self.height // self.size_multiple)

    @property
    def uses_guidance(self) -> bool:
        """Whether any step runs the negative prompt."""
        return max(self.guidance_scale, self.guidance_scale_2) > 1


def check_numbers(request: Request) -> None:
    """Refuse numbers that no model takes. Needs no model file.

    Raises: InputError: number_invalid, frames_invalid, size_invalid, prompt_invalid, lora_invalid.
    """
    if not request.prompt.strip():
        raise InputError("prompt_invalid", "input", "<prompt> is empty", "Say what the video shows")
    whole = {"steps": request.steps, "fps": request.fps}
    for name, value in whole.items():
        if value is not None and not 1 <= value <= 1000:
            raise InputError("number_invalid", "input", f"<{name}> is {value}", "Use 1 to 1000")
    if isinstance(request.num_frames, int):
        check_frames(request.num_frames)
    for absent, how in ((None, "given"), (AUTO, "a number")):
        if (request.width == absent) != (request.height == absent):
            raise InputError(
                "size_invalid",
                "input",
                f"only one of <width> ({request.width}) and <height> ({request.height}) is {how}",
                "Give both, or none for the model's own size, or auto for both",
            )
    if not 0 <= request.seed < 2**63:
        raise InputError("number_invalid", "input", f"<seed> is {request.seed}", f"Use 0 to {2**63 - 1}")
    if request.sampler not in SAMPLERS:
        raise InputError(
            "number_invalid", "input", f"<sampler> is {request.sampler!r}", f"Use one of: {', '.join(SAMPLERS)}"
        )
    _check_range("shift", request.shift, 0.01, 100)
    _check_range("boundary_ratio", request.boundary_ratio, 0, 1)
    _check_range("guidance_scale", request.guidance_scale, 0, 100)
    _check_range("guidance_scale_2", request.guidance_scale_2, 0, 100)
    check_loras(request.loras)


def check_frames(num_frames: int) -> None:
    """Refuse a number of frames that is not 4n+1, or too large for the position table; names the nearest that are."""
    longest = 4 * (MAX_ROPE_POSITIONS - 1) + 1
    if num_frames > longest:
        raise InputError("frames_invalid", "input", f"<num_frames> is {num_frames}", f"Use {longest} or less")
    if num_frames >= 1 and num_frames % 4 == 1:
        return
    lower = max(1, (num_frames - 1) // 4 * 4 + 1)
    raise InputError(
        "frames_invalid",
        "input",
        f"<num_frames> is {num_frames}; Wan's VAE takes 4n+1 frames",
        f"Use {lower} or {lower + 4}",
    )


def check_size(width: int, height: int, multiple: int) -> None:
    """Refuse a size that is not a positive multiple, or too large for the position table; names the nearest."""
    largest = MAX_ROPE_POSITIONS * multiple
    for name, value in (("width", width), ("height", height)):
        if not 1 <= value <= largest:
            raise InputError("size_invalid", "input", f"<{name}> is {value}", f"Use {multiple} to {largest}")
    wrong = {name: value for name, value in (("width", width), ("height", height)) if value % multiple}
    if wrong:
        ways = (f"<{name}> {_two_nearest(value, multiple)}" for name, value in wrong.items())
        raise InputError(
            "size_invalid",
            "input",
            f"{width}x{height}: {' and '.join(f'<{name}> {value}' for name, value in wrong.items())} must be a "
            f"multiple of {multiple} for this model",
            f"Use {', '.join(ways)}",
        )


def _two_nearest(value: int, multiple: int) -> str:
    lower = value // multiple * multiple
    return f"{lower} or {lower + multiple}" if lower else str(multiple)


def default_size(variant: Variant) -> tuple[int, int]:
    """The smallest official size, landscape: it needs the least memory."""
    return min(variant.sizes, key=lambda size: (size[0] * size[1], -size[0]))


def settle(request: Request, identity: Identity, variant: Variant) -> Settings:
    """Complete a request for the transformer at hand, whose size is no longer `auto`. Reads the images, no weights.

    Args:
        identity: of the transformer that runs first. variant: its entry of `VARIANTS`.
    Raises: InputError: also image_missing and image_unexpected.
    """
    check_numbers(request)
    notices: list[str] = []
    picture = last_picture = None
    if request.image is not None:
        if not variant.takes_image:
            raise InputError(
                "image_unexpected",
                "input",
                f"<image> is given, but the transformer is {identity.variant} with {identity.in_channels} input "
                "channels, which makes video from text only",
                "Leave <image> out, or use an I2V model (36 channels)",
            )
        picture, said = load_image(request.image, "image")
        notices += said
    elif variant.needs_image:
        raise InputError(
            "image_missing",
            "input",
            f"the transformer is {identity.variant} with {identity.in_channels} input channels, which starts from "
            "a picture, and no <image> is given",
            "Give <image>, or use a T2V model (16 channels)",
        )
    if request.last_image is not None:
        if picture is None or variant.expand_timesteps:
            raise InputError(
                "image_unexpected",
                "input",
                f"<last_image> needs an <image> and a model with 36 input channels; this is {identity.variant} with "
                f"{identity.in_channels}",
                "Leave <last_image> out, or use an I2V-A14B pair",
            )
        if request.num_frames == 1:
            raise InputError(
                "frames_invalid",
                "input",
                "<num_frames> is 1, which has no room for a <last_image> after the first",
                "Use 5 or more, or leave <last_image> out",
            )
        last_picture, said = load_image(request.last_image, "last_image")
        notices += said
    width, height = default_size(variant)
    if isinstance(request.width, int) and isinstance(request.height, int):
        width, height = request.width, request.height
    elif picture is not None:
        width, height = size_for_image(picture, width * height, variant.size_multiple)
    check_size(width, height, variant.size_multiple)
    if picture is not None:
        picture, said = fit_image(picture, width, height)
        notices += [said] if said else []
    if last_picture is not None:
        last_picture, said = fit_image(last_picture, width, height)
        notices += [said] if said else []
    steps = request.steps or variant.steps
    shift = variant.shift if request.shift is None else request.shift
    boundary = variant.boundary_ratio if request.boundary_ratio is None else request.boundary_ratio
    for name in ("boundary_ratio", "guidance_scale_2"):
        if variant.boundary_ratio is None and getattr(request, name) is not None:
            raise InputError(
                "number_invalid",
                "input",
                f"<{name}> is {getattr(request, name)}, but {identity.variant} is one model without a switch",
                "Leave it out",
            )
    guidance = variant.guidance_scale if request.guidance_scale is None else request.guidance_scale
    guidance_2 = variant.guidance_scale_2 if request.guidance_scale is None else None
    return Settings(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt,
        out=request.out,
        image=picture,
        last_image=last_picture,
        width=width,
        height=height,
        num_frames=request.num_frames if isinstance(request.num_frames, int) else variant.num_frames,
        steps=steps,
        high_steps=steps if boundary is None else count_high_steps(request.sampler, steps, shift, boundary),
        seed=request.seed,
        sampler=request.sampler,
        shift=shift,
        boundary_ratio=boundary,
        guidance_scale=guidance,
        guidance_scale_2=next(scale for scale in (request.guidance_scale_2, guidance_2, guidance) if scale is not None),
        fps=request.fps or variant.fps,
        size_multiple=variant.size_multiple,
        notices=tuple(notices),
    )


def _check_range(name: str, value: float | None, low: float, high: float) -> None:
    if value is not None and not (math.isfinite(value) and low <= value <= high):
        raise InputError("number_invalid", "input", f"<{name}> is {value}", f"Use {low} to {high}")
