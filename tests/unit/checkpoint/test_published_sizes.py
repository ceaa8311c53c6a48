"""The layout writers' rules, at full size, give the published files' sizes to the byte."""

import math

import gguf
import pytest
from wan_files import SIZES

from wanfit.checkpoint.structure import transformer_tensors
from wanfit.tiny.gguf_layout import tensor_types

# QuantStack/Wan2.2-T2V-A14B-GGUF and -TI2V-5B-GGUF, one file
T2V = {"Q8_0": 15404970496, "Q6_K": 12002013696, "Q5_K_M": 10790416896, "Q5_K_S": 10135876096, "Q5_1": 11014058496,
       "Q5_0": 10312823296, "Q4_K_M": 9650090496, "Q4_K_S": 8746512896, "Q4_1": 9257693696, "Q4_0": 8556458496,
       "Q3_K_L": 7783952896, "Q3_K_M": 7174468096, "Q3_K_S": 6513373696, "Q2_K": 5299319296}  # fmt: skip
SMALL = {"Q8_0": 5400179040, "Q6_K": 4211683680, "Q5_K_M": 3810603360, "Q4_K_M": 3433116000, "Q2_K": 1853862240}


def padded(nbytes: int) -> int:
    return -(-nbytes // 32) * 32


def text(value: str) -> int:
    return 8 + len(value)


@pytest.mark.parametrize(
    ("variant", "file_type", "size"),
    [*(("t2v-a14b", t, s) for t, s in T2V.items()), *(("ti2v-5b", t, s) for t, s in SMALL.items())],
)
def test_gguf(variant, file_type, size):
    shapes = transformer_tensors(**SIZES[variant], text_dim=4096, freq_dim=256)
    header = 24 + text("general.architecture") + 4 + text("wan")
    header += text("general.quantization_version") + 8 + text("general.file_type") + 8
    header += sum(text(name) + 4 + 8 * len(shape) + 12 for name, shape in shapes.items())
    data = 0
    for name, kind in tensor_types(shapes, file_type).items():
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        data += padded(math.prod(shapes[name]) // block * block_bytes)
    assert padded(header) + data == size
