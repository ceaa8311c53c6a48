"""One flat buffer holds a block exactly."""

from __future__ import annotations

import pytest
import torch
from block_files import MemoryFile, mixed_block

from wanfit.errors import CheckpointError
from wanfit.offload.layout import ALIGNMENT, BlockFile, BlockLayout
from wanfit.quant import dequantize


def test_write_then_view_gives_the_same_weights():
    weights = mixed_block(3)
    layout = BlockLayout(weights)
    buffer = torch.full((layout.nbytes,), 0xAB, dtype=torch.uint8)
    layout.write(weights, buffer)
    seen = layout.view(buffer)
    assert seen.keys() == weights.keys()
    for key, weight in weights.items():
        assert seen[key].format == weight.format
        assert seen[key].shape == weight.shape
        assert seen[key].options == weight.options
        assert seen[key].params.keys() == weight.params.keys()
        assert torch.equal(dequantize(seen[key], torch.float32), dequantize(weight, torch.float32))


def test_tensors_are_views_of_the_buffer_at_aligned_offsets():
    weights = mixed_block(0)
    layout = BlockLayout(weights)
    buffer = torch.zeros(layout.nbytes, dtype=torch.uint8)
    start = buffer.data_ptr()
    offsets = [
        tensor.data_ptr() - start
        for weight in layout.view(buffer).values()
        for tensor in (weight.data, *weight.params.values())
    ]
    assert len(set(offsets)) == len(offsets)
    assert all(0 <= offset < layout.nbytes and offset % ALIGNMENT == 0 for offset in offsets)


def test_a_file_with_a_gap_in_its_blocks_is_refused():
    file = MemoryFile({0: mixed_block(0), 2: mixed_block(2)})
    with pytest.raises(CheckpointError, match=r"\[0, 2\]") as caught:
        BlockFile(file)
    assert caught.value.code == "tensors_missing"
