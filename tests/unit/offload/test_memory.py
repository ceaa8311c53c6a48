"""What is kept in the host cache is not kept as pages of the file as well."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from wanfit.checkpoint.mapped import MappedFile
from wanfit.offload import BlockStore
from wanfit.quant import StoredWeight

COUNT, SIDE = 8, 1024
BLOCK_BYTES = SIDE * SIDE * 4


class MappedMatrices:
    """`StoredTensors` over a real file: one float32 matrix a block, all of whose elements are the block's number."""

    def __init__(self, path: Path) -> None:
        with path.open("wb") as file:
            for index in range(COUNT):
                file.write(torch.full((SIDE, SIDE), float(index)).numpy().tobytes())
        self._file = MappedFile(path)

    @property
    def tensors(self) -> Mapping[str, object]:
        return {f"blocks.{index}.a.weight": index for index in range(COUNT)}

    def load(self, name: str) -> StoredWeight:
        offset = int(name.split(".")[1]) * BLOCK_BYTES
        data = self._file.tensor(offset, BLOCK_BYTES, torch.float32, (SIDE, SIDE))
        return StoredWeight("f32", (SIDE, SIDE), data)

    def forget(self, name: str) -> None:
        self._file.forget(int(name.split(".")[1]) * BLOCK_BYTES, BLOCK_BYTES)


def file_pages() -> int:
    """Bytes of file pages in this process's resident set."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile"))


def one_pass(store: BlockStore) -> None:
    for index in range(COUNT):
        with store.source().onload(index) as weights:
            assert torch.equal(weights["a.weight"].data, torch.full((SIDE, SIDE), float(index)))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_file_pages_leave_the_resident_set_when_a_block_is_in_the_cache(tmp_path: Path):
    file = MappedMatrices(tmp_path / "blocks.bin")
    before = file_pages()
    with BlockStore([file], torch.device("cpu"), policy="stream", ram_budget=COUNT * BLOCK_BYTES) as store:
        one_pass(store)
        assert file_pages() - before < BLOCK_BYTES
        assert store.report.host_bytes >= COUNT * BLOCK_BYTES
        store.release()
        one_pass(store)  # the file can be read again


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_file_pages_stay_where_they_are_the_only_copy(tmp_path: Path):
    """Blocks that pass through the ring are read again in each pass: dropping their pages would cost time."""
    file = MappedMatrices(tmp_path / "blocks.bin")
    before = file_pages()
    with BlockStore([file], torch.device("cpu"), policy="stream") as store:
        one_pass(store)
        assert file_pages() - before >= (COUNT - 1) * BLOCK_BYTES


def test_views_stay_valid_when_their_pages_are_dropped(tmp_path: Path):
    file = MappedMatrices(tmp_path / "blocks.bin")
    view = file.load("blocks.3.a.weight").data
    assert view[5, 5] == 3
    file.forget("blocks.3.a.weight")
    assert torch.equal(view, torch.full((SIDE, SIDE), 3.0))
