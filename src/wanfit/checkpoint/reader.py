"""Opening a checkpoint: from a path to typed, checked, memory-mapped tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, TracebackType

import torch

from ..errors import CheckpointError
from ..quant import StoredWeight, check_format
from .companions import SCALED, StoredTensor, group
from .folders import model_files
from .gguf_file import read_gguf
from .identity import Identity, identify
from .mapped import MappedFile
from .raw import TYPES, RawFile, RawTensor, damaged
from .recognise import recognise
from .safetensors_file import read_safetensors

_FLOAT8 = {"f8_e4m3": torch.float8_e4m3fn, "f8_e5m2": torch.float8_e5m2, "mxfp8": torch.float8_e4m3fn}
_BYTE_TYPES = ("u8", "f8_e8m0", "f4", "bool")
_PICKLES = (".pth", ".pt", ".pt2", ".ckpt", ".bin", ".pkl")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor as the header describes it; `nbytes` (without scales) lie at `offset` of `file`."""

    name: str
    stored_name: str
    shape: tuple[int, ...]
    format: str
    nbytes: int
    offset: int
    file: Path


class Checkpoint:
    """An open model file or folder. Nothing but headers has been read; use it as a context manager.

    Attributes:
        path: what was opened.
        container: safetensors, gguf or folder.
        metadata: header metadata, GGUF keys, or the config.json of a folder.
        identity: which model it is.
        tensors: of the model, by canonical name.
        extras: what else the file carries for the model: `spiece_model`.
    """

    def __init__(self, path: Path, raw: RawFile, files: list[MappedFile]) -> None:
        self.path, self.container, self.metadata = path, raw.container, raw.metadata
        self._files = files
        stored = {tensor.name: tensor for tensor in raw.tensors}
        found = recognise(path, stored.keys(), raw.metadata.get("general.architecture"))
        inside = {n.removeprefix(found.prefix): t for n, t in stored.items() if n.startswith(found.prefix)}
        grouped = group(inside, raw.metadata, found.prefix)
        self._tensors = {
            canonical: grouped.tensors[name.removeprefix(found.prefix)] for name, canonical in found.canonical.items()
        }
        self._extras = grouped.extras
        self.identity: Identity = identify(path, found.convention, self._tensors, raw.metadata)
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(
            {name: _info(name, t.raw, t.format, t.shape) for name, t in self._tensors.items()}
        )
        self.extras: Mapping[str, TensorInfo] = MappingProxyType(
            {name: _info(name, raw, raw.dtype, raw.shape) for name, raw in self._extras.items()}
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors with their scales."""
        return self.identity.nbytes

    def load(self, name: str) -> StoredWeight:
        """The tensor in its stored bytes: views of the memory map, which stays mapped as long as they live.

        Raises:
            KeyError: the model has no such tensor.
            QuantError: format_unsupported for a format that WanFit recognises and cannot compute with.
            ValueError: the checkpoint is closed.
        """
        stored = self._tensors[name]
        check_format(stored.format, "load")
        params = {role: _param(stored, role, raw) for role, raw in stored.params.items()}
        if "input_scale" in params and stored.format in SCALED and float(params["input_scale"]) == 1.0:
            del params["input_scale"]  # 1.0 is how the files say that none was measured
        return StoredWeight(stored.format, stored.shape, _data(stored), params, stored.options)

    def forget(self, name: str) -> None:
        """Take a tensor that was read out of the process's memory, see `MappedFile.forget`; views stay valid."""
        raw = self._tensors[name].raw
        raw.file.forget(raw.offset, raw.nbytes)

    def load_extra(self, name: str) -> torch.Tensor:
        """A tensor of `extras`, as a view of the memory map."""
        return self._extras[name].view()

    def close(self) -> None:
        """Give up the files. What was loaded stays valid and keeps its file mapped until it is gone."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a Wan transformer, a Wan VAE or a UMT5 encoder.

    Reads and checks headers only: every size, offset, name and shape, before anything is allocated.

    Args:
        path: .safetensors, .gguf, a diffusers component folder or a folder of shards.

    Raises:
        CheckpointError: file_missing, file_unreadable, file_unsupported, file_damaged, model_unknown,
            model_unsupported, tensors_missing, tensors_mismatch.
        QuantError: format_unknown, format_unsupported.
    """
    path = Path(path)
    if path.is_dir():
        try:
            return _open_folder(path)
        except OSError as error:
            raise CheckpointError(
                "file_unreadable", "inspect", f"{path} cannot be opened: {error.strerror}", "Check the permissions"
            ) from error
    file, raw = open_file(path)
    return Checkpoint(path, raw, [file])


def open_file(path: Path) -> tuple[MappedFile, RawFile]:
    """Open a single .safetensors or .gguf file and check its header, whatever it holds.

    Raises:
        CheckpointError: file_missing, file_unreadable, file_unsupported, file_damaged.
        QuantError: format_unknown.
    """
    if not path.is_file():
        what = "does not exist"
        if path.is_symlink():
            what = f"is a link to {path.readlink()}, where no file is"
        elif path.exists():
            what = "is no file"
        raise CheckpointError("file_missing", "inspect", f"{path} {what}", "Check the path")
    suffix = path.suffix.lower()
    if suffix in _PICKLES:
        raise CheckpointError("file_unsupported", "inspect", f"{path} is a pickle ({suffix})", _RECIPE)
    if path.name.endswith(".index.json"):
        raise CheckpointError(
            "file_unsupported", "inspect", f"{path} is an index of shards", f"Give the folder {path.absolute().parent}"
        )
    if suffix not in (".safetensors", ".sft", ".gguf"):
        raise CheckpointError(
            "file_unsupported", "inspect", f"{path} is a {suffix or 'nameless'} file", "Give .safetensors or .gguf"
        )
    file = MappedFile(path)
    return file, _read(file)


_RECIPE = (
    "Convert it once, where you trust it: torch.load(path, map_location='cpu', weights_only=True), then "
    "safetensors.torch.save_file(tensors, 'model.safetensors')"
)


def _read(file: MappedFile) -> RawFile:
    start = file.read(0, 64)
    is_gguf = file.path.suffix.lower() == ".gguf"
    if start[8:9] == b"{" and is_gguf:
        raise damaged(file, "this is a safetensors file under another name", "Rename it to .safetensors")
    if start[:4] == b"GGUF" and not is_gguf:
        raise damaged(file, "this is a GGUF file under another name", "Rename it to .gguf")
    if start[:2] in (b"PK", b"\x80\x02"):
        raise CheckpointError("file_unsupported", "inspect", f"{file.path} is a PyTorch pickle inside", _RECIPE)
    if start.startswith(b"version https://git-lfs"):
        raise damaged(file, "this is a Git LFS pointer, not the model", "Fetch it with git lfs pull")
    if start.lstrip()[:5].lower() in (b"<!doc", b"<html"):
        raise damaged(file, "this is a web page, not the model", "The download needs a log-in or another link")
    return read_gguf(file) if is_gguf else read_safetensors(file)


def _open_folder(folder: Path) -> Checkpoint:
    paths, weight_map, config = model_files(folder)
    files = [MappedFile(path) for path in paths]
    tensors: list[RawTensor] = []
    seen: dict[str, str] = {}
    for file in files:
        for tensor in _read(file).tensors:
            if tensor.name in seen:
                raise damaged(file, f"tensor {tensor.name} is also in {seen[tensor.name]}")
            seen[tensor.name] = file.path.name
            tensors.append(tensor)
    wrong = [name for name, shard in weight_map.items() if seen.get(name) != shard]
    if wrong:
        raise damaged(
            files[0],
            f"{len(wrong)} tensors are not in the shard that the index names, the first: {', '.join(wrong[:5])}",
        )
    return Checkpoint(folder, RawFile("folder", config, tensors), files)


def _info(name: str, raw: RawTensor, key: str, shape: tuple[int, ...]) -> TensorInfo:
    return TensorInfo(name, raw.name, shape, key, raw.nbytes, raw.offset, raw.file.path)


def _data(stored: StoredTensor) -> torch.Tensor:
    raw = stored.raw
    if stored.format in _FLOAT8:  # also when the file stores them as bytes
        return raw.file.tensor(raw.offset, raw.nbytes, _FLOAT8[stored.format], stored.shape)
    if raw.dtype in TYPES or raw.dtype in _BYTE_TYPES:
        return raw.view()
    rows = math.prod(stored.shape[:-1])
    return raw.file.tensor(raw.offset, raw.nbytes, torch.uint8, (rows, raw.nbytes // rows))


def _param(stored: StoredTensor, role: str, raw: RawTensor) -> torch.Tensor:
    param = raw.view()
    return param.view(()) if role in ("scale", "input_scale") and param.numel() == 1 else param
