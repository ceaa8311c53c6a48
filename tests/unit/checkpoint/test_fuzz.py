"""Random damage to headers: a clear error or a good file, never another exception, never much memory."""

import random
import tracemalloc
from pathlib import Path

import pytest
from safetensors.torch import save_file

from wanfit.checkpoint import open_checkpoint
from wanfit.errors import WanFitError
from wanfit.tiny import layouts
from wanfit.tiny.gguf_layout import write_gguf
from wanfit.tiny.models import tiny_transformer

ROUNDS = 200
MEMORY = 32 * 2**20  # a sound open takes under 2 MiB; the headers here have 8 to 12 kB


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, tuple[bytes, int]]:
    """Suffix -> a small file and the size of its header."""
    folder = tmp_path_factory.mktemp("fuzz")
    weights = tiny_transformer(dim=128, ffn_dim=256)
    packed = write_gguf(folder / "m.gguf", weights, "Q8_0", flat_patch_embedding=True).read_bytes()
    quantised = layouts.write_comfy_quant(folder / "m.safetensors", weights).read_bytes()
    data = sum(-(-info.nbytes // 32) * 32 for info in open_checkpoint(folder / "m.gguf").tensors.values())
    return {
        ".gguf": (packed, len(packed) - data),
        ".safetensors": (quantised, 8 + int.from_bytes(quantised[:8], "little")),
    }


def damage(content: bytes, header: int, dice: random.Random) -> bytes:
    kind = dice.randrange(3)
    if kind == 0:
        return content[: dice.randrange(len(content) if dice.random() < 0.3 else header)]
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 8))):
        place = dice.randrange(header)
        changed[place] = changed[place] ^ 1 << dice.randrange(8) if kind == 1 else dice.randrange(256)
    return bytes(changed)


@pytest.mark.parametrize("suffix", [".safetensors", ".gguf"])
def test_damaged_headers(tmp_path, sources, suffix):
    content, header = sources[suffix]
    dice = random.Random(0)
    path = tmp_path / f"m{suffix}"
    outcomes = {"opened": 0, "refused": 0}
    tracemalloc.start()
    try:
        for _ in range(ROUNDS):
            path.write_bytes(damage(content, header, dice))
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                with open_checkpoint(path) as checkpoint:
                    for name in list(checkpoint.tensors)[:5]:
                        checkpoint.load(name)
                outcomes["opened"] += 1
            except WanFitError:
                outcomes["refused"] += 1
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY
    finally:
        tracemalloc.stop()
    assert outcomes["refused"] > ROUNDS // 2


def test_the_undamaged_files_open(tmp_path, sources):
    for suffix, (content, _) in sources.items():
        path = Path(tmp_path / f"m{suffix}")
        path.write_bytes(content)
        open_checkpoint(path).close()


def test_no_tensor_is_no_model(tmp_path):
    save_file({}, tmp_path / "m.safetensors")
    with pytest.raises(WanFitError):
        open_checkpoint(tmp_path / "m.safetensors")
