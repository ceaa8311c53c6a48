"""LoRAs on the device: all of them at once, or each with its block through pinned memory and a ring of slots."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from ..blocks import BlockPatches
from ..errors import InputError
from ..quant import StoredWeight
from .layout import BlockLayout
from .store import BlockStore

RING = 2
_FORMATS = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class PatchStore:
    """The changes of one transformer's blocks, where the blocks are computed. Used by one thread.

    Args:
        patches: by the block's number; LoRA matrices travel in `dtype`, differences as they are.
        keep: all of them stay on the device from their first use on; otherwise they are copied from the host with
            each block, beside the computation. On the CPU they are read in place.

    Raises:
        InputError: lora_invalid: at a block's first use, when its changes hold NaN or infinity. Attention on the CPU
            makes zeros of NaN, so that it would not be seen in the result.

    Memory: device: `keep`: all of them, else the largest two blocks'. Host: `keep` or CPU: none of its own, else all
        of them, pinned.
    """

    def __init__(
        self, patches: Mapping[int, BlockPatches], device: torch.device, dtype: torch.dtype, *, keep: bool
    ) -> None:
        self._patches, self._device, self._dtype = dict(patches), device, dtype
        self._places = {index: place for place, index in enumerate(sorted(patches))}
        self._kept: dict[int, dict[str, torch.Tensor]] | None = {} if keep and device.type != "cpu" else None
        self._store: BlockStore | None = None
        self._finite: set[int] = set()
        if patches and not keep and device.type != "cpu":
            file = PatchFile([patches[index] for index in self._places], dtype)
            self._store = BlockStore(
                [file], device, policy="stream", ram_budget=file.largest * len(file), ring=min(RING, len(file))
            )

    @contextmanager
    def onload(self, index: int) -> Generator[BlockPatches]:
        """Block `index`'s changes on the device for the time of the `with`; empty where it has none."""
        patches = self._patches.get(index)
        if patches is None:
            yield BlockPatches()
            return
        if index not in self._finite:
            _require_finite(index, patches, self._dtype)
            self._finite.add(index)
        if self._store is not None:
            with self._store.onload(0, self._places[index]) as weights:
                yield patches.placed(lambda name: weights[name].data)
        elif self._kept is not None:
            if index not in self._kept:
                tensors = patches.tensors(self._dtype)
                self._kept[index] = {name: tensor.to(self._device, wanted) for name, tensor, wanted in tensors}
            yield patches.placed(self._kept[index].__getitem__)
        else:
            yield patches

    def take_strengths(self, patches: Mapping[int, BlockPatches]) -> bool:
        """Go on with other strengths of the same tensors; False, and no change, when any tensor is another."""
        same = patches.keys() == self._patches.keys() and all(
            _tensors(patches[index]) == _tensors(self._patches[index]) for index in patches
        )
        if same:
            self._patches = dict(patches)
        return same

    @property
    def device_bytes(self) -> int:
        """Bytes taken on the device."""
        kept = sum(tensor.nbytes for tensors in (self._kept or {}).values() for tensor in tensors.values())
        return kept + (0 if self._store is None else self._store.report.device_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory beside the tensors that were given."""
        return 0 if self._store is None else self._store.report.host_bytes

    def release_device(self) -> None:
        """Give all device memory back; it is taken again at the next use."""
        if self._kept is not None:
            self._kept.clear()
        if self._store is not None:
            self._store.release_device()

    def close(self) -> None:
        """Give all memory back."""
        self.release_device()
        if self._store is not None:
            self._store.close()


class PatchFile:
    """The changes as blocks that a `BlockStore` brings in; a name is `self_attn.q 0 down`."""

    def __init__(self, blocks: Sequence[BlockPatches], dtype: torch.dtype) -> None:
        self._blocks, self._dtype = blocks, dtype
        self.layouts = [
            BlockLayout(dict(_stored(block, lambda tensor, wanted: tensor.to("meta", wanted), dtype)))
            for block in blocks
        ]

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def largest(self) -> int:
        """Bytes of the largest block."""
        return max(layout.nbytes for layout in self.layouts)

    def read(self, index: int, buffer: torch.Tensor) -> None:
        """Copy one block's tensors into `buffer`, in the dtypes that they travel in."""
        weights = _stored(self._blocks[index], lambda tensor, wanted: tensor.to(wanted), self._dtype)
        self.layouts[index].write(dict(weights), buffer)

    def forget(self, index: int) -> None:
        """Nothing is mapped."""


def _require_finite(index: int, block: BlockPatches, dtype: torch.dtype) -> None:
    for name, tensor, _ in block.tensors(dtype):
        values = tensor if tensor.itemsize > 1 else tensor.float()  # PyTorch does not ask float8
        if not bool(values.isfinite().all()):
            raise InputError(
                "lora_invalid",
                "denoise",
                f"A LoRA holds NaN or infinity for block {index} ({name})",
                "Download it again, or run without it: compare its size and hash with where it came from",
            )


def _stored(
    block: BlockPatches, convert: Callable[[torch.Tensor, torch.dtype], torch.Tensor], dtype: torch.dtype
) -> Iterator[tuple[str, StoredWeight]]:
    for name, tensor, wanted in block.tensors(dtype):
        yield name, StoredWeight(_FORMATS[wanted], tuple(tensor.shape), convert(tensor, wanted))


def _tensors(block: BlockPatches) -> list[tuple[str, int]]:
    """What tells whether two changes are of the same tensors; both are alive, so that an id names one of them."""
    return [(name, id(tensor)) for name, tensor, _ in block.tensors(torch.float32)]
