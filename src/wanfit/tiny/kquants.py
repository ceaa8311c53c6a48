"""Quantisers for the GGUF types that gguf-py can only read, for tests and tiny models.

They write valid blocks with a plain search for the scales; llama.cpp's own quantisers are a little more accurate.

Source of the layouts: gguf-py gguf/quants.py, MIT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
from gguf import quants
from numpy.typing import NDArray

from ..errors import QuantError

_Floats = NDArray[np.floating[Any]]
_Bytes = NDArray[Any]  # uint8: numpy's annotations lose it in shifts
_Parts = tuple[NDArray[Any], ...]

_IQ4 = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=np.float32)
_STRETCH = np.linspace(0.7, 1.1, 17, dtype=np.float32)  # of the scale that just holds the largest value


def quantize(array: NDArray[np.float32], type_name: str) -> NDArray[np.uint8]:
    """Quantise a matrix to one of the GGUF types that WanFit reads.

    Args:
        array: float32 (rows, columns); columns a multiple of the type's block (256, or 32).
        type_name: Q2_K ... Q6_K, IQ4_NL, IQ4_XS; or a type that gguf-py writes: Q8_0, Q5_0, Q5_1, Q4_0, Q4_1, BF16.
    Returns: uint8 (rows, row_bytes).
    Raises: QuantError: format_unsupported, another type or a width that is no whole number of blocks.
    """
    kind = gguf.GGMLQuantizationType.__members__.get(type_name)
    if kind is None or (type_name not in _QUANTIZERS and type_name not in _DELEGATED):
        raise QuantError("format_unsupported", "save", f"No quantiser for {type_name}", "Use Q8_0 or a K type")
    elements, _ = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = array.shape
    if columns % elements:
        raise QuantError(
            "format_unsupported",
            "save",
            f"{columns} columns are no whole number of {type_name} blocks of {elements}",
            "Use a type with smaller blocks",
        )
    array = np.ascontiguousarray(array, dtype=np.float32)
    if type_name in _DELEGATED:
        return quants.quantize(array, kind).view(np.uint8).reshape(rows, -1)
    return _QUANTIZERS[type_name](array.reshape(-1, elements)).reshape(rows, -1)


def _with_minimum(blocks: _Floats, group: int, top: int, scale_top: int) -> _Parts:
    """x ~ d * scale * q - dmin * minimum by groups, q in 0 ... top: bytes of d and of dmin, scale, minimum, q."""
    x = blocks.reshape(len(blocks), -1, group)
    low = np.minimum(x.min(-1), 0)
    span = np.maximum(x.max(-1), 0) - low

    def attempt(stretch: float) -> tuple[_Floats, _Parts]:
        d, scale = _shared(span * stretch / top, scale_top)
        dmin, minimum = _shared(-low * stretch, scale_top)
        step, offset = (d * scale)[..., None], (dmin * minimum)[..., None]
        q = np.clip(np.rint(_divide(x + offset, step)), 0, top)
        packed = (_bytes_of(d), _bytes_of(dmin), scale.astype(np.uint8), minimum.astype(np.uint8), q.astype(np.uint8))
        return step * q - offset, packed

    return _search(x, attempt)


def _symmetric(blocks: _Floats, group: int, bottom: int, scale_top: int) -> _Parts:
    """x ~ d * scale * q by groups, q in bottom ... -bottom - 1: bytes of d, scale, q."""
    x = blocks.reshape(len(blocks), -1, group)
    peak = _peak(x)

    def attempt(stretch: float) -> tuple[_Floats, _Parts]:
        d, scale = _shared(peak * stretch / bottom, scale_top)
        step = (d * scale)[..., None]
        q = np.clip(np.rint(_divide(x, step)), bottom, -bottom - 1)
        return step * q, (_bytes_of(d), scale.astype(np.int8), q.astype(np.int8))

    return _search(x, attempt)


def _codebook(blocks: _Floats, scale_top: int) -> _Parts:
    """x ~ d * scale * codebook[q] by groups of 32: bytes of d, scale, q."""
    x = blocks.reshape(len(blocks), -1, 32)
    peak = _peak(x)
    between = (_IQ4[1:] + _IQ4[:-1]) / 2

    def attempt(stretch: float) -> tuple[_Floats, _Parts]:
        d, scale = _shared(peak * stretch / _IQ4[0], scale_top)
        step = (d * scale)[..., None]
        q = np.searchsorted(between, _divide(x, step)).astype(np.uint8)
        return step * _IQ4[q], (_bytes_of(d), scale.astype(np.int8), q)

    return _search(x, attempt)


def _search(x: _Floats, attempt: Callable[[float], tuple[_Floats, _Parts]]) -> _Parts:
    """For each block the parts of the attempt with the smallest squared error."""
    errors: list[_Floats] = []
    found: list[_Parts] = []
    for stretch in _STRETCH:
        value, parts = attempt(stretch)
        errors.append(np.square(value - x).sum((-2, -1)))
        found.append(parts)
    best = np.stack(errors).argmin(0), np.arange(len(x))
    return tuple(np.stack(options)[best] for options in zip(*found, strict=True))


def _peak(x: _Floats) -> _Floats:
    """The value of largest magnitude of each group, with its sign."""
    return np.take_along_axis(x, np.abs(x).argmax(-1)[..., None], -1)[..., 0]


def _shared(values: _Floats, top: int) -> tuple[_Floats, _Floats]:
    """values (n, groups) ~ d * integers: d (n, 1), rounded as float16 stores it, and integers within +-top."""
    d = (_peak(values)[..., None] / top).astype(np.float16).astype(np.float32)
    return d, np.clip(np.rint(_divide(values, d)), -top, top)


def _divide(x: _Floats, step: _Floats) -> _Floats:
    return np.divide(x, step, out=np.zeros(np.broadcast(x, step).shape, np.float32), where=step != 0)


def _bytes_of(d: _Floats) -> _Bytes:
    return d.astype(np.float16).view(np.uint8)


def _pack(q: _Bytes, width: int) -> _Bytes:
    """Fields (..., 8 // width, n) into bytes (..., n), the first field lowest."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    return np.bitwise_or.reduce(q << shifts, axis=-2)


def _join(*parts: NDArray[Any]) -> _Bytes:
    return np.concatenate([part.reshape(len(part), -1).view(np.uint8) for part in parts], axis=1)


def _q2_k(blocks: _Floats) -> _Bytes:
    d, dmin, scale, minimum, q = _with_minimum(blocks, 16, 3, 15)
    return _join(scale | minimum << 4, _pack(q.reshape(-1, 2, 4, 32), 2), d, dmin)


def _q3_k(blocks: _Floats) -> _Bytes:
    d, scale, q = _symmetric(blocks, 16, -4, 31)
    field, u = (q + 4).view(np.uint8).reshape(-1, 256), (scale + 32).view(np.uint8)
    high = _pack(field.reshape(-1, 8, 32) >> 2, 1)
    low_scales = _pack((u & 15).reshape(-1, 2, 8), 4)
    high_scales = _pack((u >> 4).reshape(-1, 4, 4), 2)
    return _join(high, _pack((field & 3).reshape(-1, 2, 4, 32), 2), low_scales, high_scales, d)


def _q4_k(blocks: _Floats) -> _Bytes:
    d, dmin, scale, minimum, q = _with_minimum(blocks, 32, 15, 63)
    return _join(d, dmin, _six_bit_pairs(scale, minimum), _pack(q.reshape(-1, 4, 2, 32), 4))


def _q5_k(blocks: _Floats) -> _Bytes:
    d, dmin, scale, minimum, q = _with_minimum(blocks, 32, 31, 63)
    high, low = _pack(q >> 4, 1), _pack((q & 15).reshape(-1, 4, 2, 32), 4)
    return _join(d, dmin, _six_bit_pairs(scale, minimum), high, low)


def _q6_k(blocks: _Floats) -> _Bytes:
    d, scale, q = _symmetric(blocks, 16, -32, 127)
    field = (q + 32).view(np.uint8).reshape(-1, 256)
    low, high = _pack((field & 15).reshape(-1, 2, 2, 64), 4), _pack((field >> 4).reshape(-1, 2, 4, 32), 2)
    return _join(low, high, scale, d)


def _iq4_nl(blocks: _Floats) -> _Bytes:
    d, _, q = _codebook(blocks, 1)
    return _join(d, _pack(q.reshape(-1, 2, 16), 4))


def _iq4_xs(blocks: _Floats) -> _Bytes:
    d, scale, q = _codebook(blocks, 31)
    u = (scale + 32).view(np.uint8)
    high = _pack((u >> 4).reshape(-1, 2, 4).swapaxes(1, 2), 2)
    low = _pack((u & 15).reshape(-1, 4, 2).swapaxes(1, 2), 4)
    return _join(d, high, low, _pack(q.reshape(-1, 8, 2, 16), 4))


def _six_bit_pairs(scale: _Bytes, minimum: _Bytes) -> _Bytes:
    """The 12 bytes of 8 scales and 8 minima of Q4_K and Q5_K."""
    first = scale[:, :4] | (scale[:, 4:] >> 4) << 6
    second = minimum[:, :4] | (minimum[:, 4:] >> 4) << 6
    return np.concatenate([first, second, (scale[:, 4:] & 15) | (minimum[:, 4:] & 15) << 4], axis=1)


_DELEGATED = frozenset({"Q8_0", "Q5_0", "Q5_1", "Q4_0", "Q4_1", "BF16"})
_QUANTIZERS: dict[str, Callable[[_Floats], _Bytes]] = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
