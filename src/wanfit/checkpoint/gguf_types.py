"""Which type each tensor of a Wan transformer has in a GGUF file of a named type.

Source: the tensor rules of llama-quantize with city96's patch for diffusion models, read off published files.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# file type -> (LlamaFileType number, base type, type of the first so many .v.weight, of the other .v.weight, of ffn.2)
FILE_TYPES: Mapping[str, tuple[int, str, int, str, str, str]] = {
    "Q8_0": (7, "Q8_0", 0, "", "Q8_0", "Q8_0"),
    "Q6_K": (18, "Q6_K", 0, "", "Q6_K", "Q6_K"),
    "Q5_K_M": (17, "Q5_K", 0, "", "Q6_K", "Q6_K"),
    "Q5_K_S": (16, "Q5_K", 0, "", "Q5_K", "Q5_K"),
    "Q5_1": (9, "Q5_1", 0, "", "Q5_1", "Q5_1"),
    "Q5_0": (8, "Q5_0", 0, "", "Q5_0", "Q5_1"),
    "Q4_K_M": (15, "Q4_K", 0, "", "Q6_K", "Q6_K"),
    "Q4_K_S": (14, "Q4_K", 4, "Q5_K", "Q4_K", "Q5_K"),
    "Q4_1": (3, "Q4_1", 0, "", "Q4_1", "Q4_1"),
    "Q4_0": (2, "Q4_0", 0, "", "Q4_0", "Q4_1"),
    "Q3_K_L": (13, "Q3_K", 0, "", "Q5_K", "Q5_K"),
    "Q3_K_M": (12, "Q3_K", 2, "Q5_K", "Q4_K", "Q4_K"),
    "Q3_K_S": (11, "Q3_K", 0, "", "Q3_K", "Q3_K"),
    "Q2_K": (10, "Q2_K", 0, "", "Q3_K", "Q2_K"),
    "IQ4_NL": (25, "IQ4_NL", 0, "", "IQ4_NL", "IQ4_NL"),
    "IQ4_XS": (30, "IQ4_XS", 0, "", "IQ4_XS", "IQ4_XS"),
    "BF16": (32, "BF16", 0, "", "BF16", "BF16"),
    "F16": (1, "F16", 0, "", "F16", "F16"),
}
_PATCH = "patch_embedding.weight"


def tensor_types(shapes: Mapping[str, tuple[int, ...]], file_type: str, bf16_source: bool = False) -> dict[str, str]:
    """The GGUF type of each tensor of a transformer in a file of that type."""
    _, base, first, first_type, values, down = FILE_TYPES[file_type]
    early = set(list(_values(shapes))[:first])
    types: dict[str, str] = {}
    for name, shape in shapes.items():
        if name == _PATCH:
            types[name] = "F32"
        elif len(shape) != 2 or not name.startswith("blocks."):
            types[name] = ("BF16" if len(shape) == 2 else "F32") if bf16_source else "F16"
        elif name in early:
            types[name] = first_type
        elif name.endswith(".v.weight"):
            types[name] = values
        else:
            types[name] = down if name.endswith(".ffn.2.weight") else base
    return types


def _values(names: Iterable[str]) -> Iterable[str]:
    return (name for name in names if name.endswith(".v.weight"))
