"""Stored formats: the table of dequantisers, and linears and embeddings over stored weights."""

from .linear import QuantEmbedding, QuantLinear, linear
from .table import FORMATS, check_format, dequantize, gather_rows
from .weight import StoredWeight

__all__ = [
    "FORMATS",
    "QuantEmbedding",
    "QuantLinear",
    "StoredWeight",
    "check_format",
    "dequantize",
    "gather_rows",
    "linear",
]
