"""Start and end images: read, checked, brought to RGB and to the video's size without stretching."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from ..errors import InputError

# What Pillow turns into 8-bit RGB without guessing a value range or a colour behind it.
PLAIN_MODES = frozenset({"1", "L", "P", "RGB", "CMYK", "YCbCr", "LA", "PA", "RGBA"})
EXIF_ORIENTATION = 0x0112


def load_image(path: Path, name: str) -> tuple[Image.Image, list[str]]:
    """Read an image as RGB, upright.

    Args:
        path: the file. name: the input's engine name (`image`, `last_image`), for messages.
    Returns: the image, and one sentence for each thing that was done to it (turned by its EXIF flag, grey
        spread over three channels, an opaque alpha channel dropped ...).
    Raises: InputError: missing or unreadable file, transparency, a pixel format of more than 8 bits.
    """
    if not path.is_file():
        what = "is no file" if path.exists() else "does not exist"
        raise InputError("image_invalid", "input", f"<{name}> {path} {what}", "Give a PNG, JPEG or WebP file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as opened:
                opened.load()
                frames = getattr(opened, "n_frames", 1)
                turned = opened.getexif().get(EXIF_ORIENTATION, 1) != 1
                picture = ImageOps.exif_transpose(opened)
    except (UnidentifiedImageError, Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _unreadable(name, path, str(error)) from error
    except (OSError, SyntaxError, ValueError) as error:  # Pillow's decoders raise all three on damaged files
        raise _unreadable(name, path, str(error)) from error
    notices: list[str] = []
    if frames > 1:
        notices.append(f"{path.name} has {frames} frames; the first is used")
    if turned:
        notices.append(f"{path.name} is turned upright by its EXIF flag ({picture.width}x{picture.height})")
    if picture.mode not in PLAIN_MODES:
        raise InputError(
            "image_invalid",
            "input",
            f"<{name}> {path.name} has pixel format {picture.mode}, which is not 8 bits a channel",
            "Save it as an 8-bit RGB PNG or JPEG",
        )
    if picture.has_transparency_data:
        picture = picture.convert("RGBA")
        alpha = picture.getchannel("A")
        if alpha.getextrema()[0] != 255:
            opaque = alpha.histogram()[255] / (alpha.width * alpha.height)
            raise InputError(
                "image_invalid",
                "input",
                f"<{name}> {path.name} is transparent in {100 * (1 - opaque):.1f} % of its pixels and a video "
                "has no transparency",
                "Put it on a background colour first and save it as RGB",
            )
        notices.append(f"{path.name} has an alpha channel that is opaque everywhere; it is dropped")
    elif picture.mode in {"1", "L"}:
        notices.append(f"{path.name} is grey; its values are used for red, green and blue")
    return picture.convert("RGB"), notices


def fit_image(picture: Image.Image, width: int, height: int) -> tuple[Image.Image, str]:
    """Scale to cover (width, height) and cut the rest off evenly at both sides, as ComfyUI's Wan nodes do.

    Returns: the image, and a sentence that says how much was cut off, empty when nothing was.
    """
    scale = max(width / picture.width, height / picture.height)
    kept = (width / scale) * (height / scale) / (picture.width * picture.height)
    fitted = ImageOps.fit(picture, (width, height), method=Image.Resampling.LANCZOS)
    if kept > 0.995:
        return fitted, ""
    return fitted, (
        f"the image is {picture.width}x{picture.height}; {100 * (1 - kept):.0f} % of it is cut off "
        f"to fill {width}x{height}"
    )


def size_for_image(picture: Image.Image, max_area: int, multiple: int) -> tuple[int, int]:
    """Width and height that keep the image's proportions: area at most `max_area`, sides rounded down.

    Source: Wan-Video/Wan2.2 wan/image2video.py@42bf4cf (area and aspect rule).
    """
    width = math.isqrt(max_area * picture.width // picture.height) // multiple * multiple
    height = math.isqrt(max_area * picture.height // picture.width) // multiple * multiple
    return max(multiple, width), max(multiple, height)


def _unreadable(name: str, path: Path, reason: str) -> InputError:
    return InputError(
        "image_invalid",
        "input",
        f"<{name}> {path} cannot be read as an image: {reason.rstrip('.')}",
        "Use a PNG, JPEG or WebP file",
    )
