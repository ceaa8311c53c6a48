"""The rows of the usual troubleshooting table, each from a failure that the card really has."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from block_files import MemoryFile
from diffusers import AutoencoderKLWan
from torch import nn
from wan_blocks import block_weights, shape_of, tiny_transformer

from wanfit.blocks import ForwardSettings, LeanBlock
from wanfit.memory.explain import Explanation, Facts, explain
from wanfit.memory.facts import gather
from wanfit.memory.record import MemoryRecord
from wanfit.offload import BlockStore
from wanfit.quant import StoredWeight
from wanfit.vae.conv3d import conv3d_trap

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

DEVICE = torch.device("cuda", 0)
GIB, MIB = 2**30, 2**20
HOLD = """
import sys, torch
free = torch.cuda.mem_get_info()[0]
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def at_most(nbytes: int) -> Iterator[None]:
    """This process may take so much from here on, beside what it has."""
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(DEVICE) + nbytes) / total, DEVICE)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def another_process(leaves: int) -> Iterator[int]:
    """It holds all of the card but `leaves`; gives its id."""
    gc.collect()
    torch.cuda.empty_cache()
    command = [sys.executable, "-c", HOLD, str(leaves)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        holder.stdout.readline()
        yield holder.pid
        holder.stdin.close()


def failure(stage: str, call, nbytes: int | None = None) -> tuple[BaseException, Explanation]:
    """What `call` raises within a stage of a record, and its explanation by the facts of that moment."""
    record = MemoryRecord(DEVICE)
    with record:
        record.begin(stage)
        with pytest.raises(Exception) as caught:
            if nbytes is None:
                call()
            else:
                with at_most(nbytes):
                    call()
        found = explain(caught.value, gather(DEVICE, torch.bfloat16, record))
    print(f"\n{type(caught.value).__name__}: {str(caught.value)[:600]}\n  -> {found}")
    assert found is not None, caught.value
    return caught.value, found


def test_load():
    """All blocks are to stay on the card, and four of twelve fit."""
    data = torch.zeros(4096, 4096)
    file = MemoryFile({i: {"a.weight": StoredWeight("f32", (4096, 4096), data)} for i in range(12)})

    def load() -> None:
        with BlockStore([file], DEVICE, policy="resident") as store:
            for index in range(12):
                with store.source().onload(index):
                    pass

    error, found = failure("load", load, 4 * 64 * MIB)
    assert isinstance(error, torch.OutOfMemoryError)
    assert found.cause == "vram full" and "in the stage load" in found.what and "this program may use" in found.what


def test_mid_denoise():
    """q, k and v of one block's self-attention."""
    model = tiny_transformer(num_layers=1)
    shape = shape_of(model)
    file = MemoryFile({0: block_weights(model.blocks[0])})
    tokens = 400_000

    def forward() -> None:
        with BlockStore([file], DEVICE, policy="stream") as store:
            block = LeanBlock(0, store.source(), shape, ForwardSettings(4096))
            rotary = torch.zeros(1, tokens, 1, shape.head_dim, device=DEVICE)
            block(
                torch.zeros(1, tokens, shape.dim, device=DEVICE),
                torch.zeros(1, 512, shape.dim, device=DEVICE),
                torch.zeros(1, 6, shape.dim, device=DEVICE),
                (rotary, rotary),
            )

    error, found = failure("denoise high", forward, 1500 * MIB)
    assert isinstance(error, torch.OutOfMemoryError) and found.cause == "vram full"
    assert "in the stage denoise high" in found.what


def vae() -> AutoencoderKLWan:
    return AutoencoderKLWan(base_dim=32, num_res_blocks=1).to(DEVICE, torch.bfloat16).requires_grad_(False)


def test_decode():
    model = vae()
    latents = torch.randn(1, 16, 3, 60, 104, device=DEVICE, dtype=torch.bfloat16)
    error, found = failure("decode and save", lambda: model.decode(latents), 300 * MIB)
    assert isinstance(error, torch.OutOfMemoryError) and found.cause == "vram full" and "decode and save" in found.what


def test_conv3d_without_cudnn_asks_for_a_workspace_of_its_own():
    """What torch 2.9.0 does with each 16-bit 3D convolution: cuDNN is passed by, and all patches are laid out at once."""
    conv = nn.Conv3d(96, 96, 3, padding=1, device=DEVICE, dtype=torch.bfloat16).requires_grad_(False)
    x = torch.zeros(1, 96, 4, 240, 416, device=DEVICE, dtype=torch.bfloat16)
    with torch.backends.cudnn.flags(enabled=True), at_most(400 * MIB):
        conv(x)  # with cuDNN the same room is enough
    with torch.backends.cudnn.flags(enabled=False):
        error, _ = failure("decode and save", lambda: conv(x), 400 * MIB)
    found = explain(error, Facts(stage="decode and save", conv3d_trap=conv3d_trap("2.9.0", 91002)))
    assert found is not None and found.cause == "conv3d workspace" and "2.9.0" in found.what


def test_after_several_runs():
    """Seven pieces of 1 GiB stay between seven that are free: half of the pool is unused, and 2 GiB are not to be had."""

    def runs() -> None:
        whole = torch.empty(7 * GIB, dtype=torch.uint8, device=DEVICE)
        del whole
        pieces = [torch.empty(GIB // 2, dtype=torch.uint8, device=DEVICE) for _ in range(14)]
        kept = pieces[::2]
        del pieces
        torch.empty(2 * GIB, dtype=torch.uint8, device=DEVICE)
        del kept

    _, found = failure("denoise low", runs, 8 * GIB)
    assert found.cause == "fragmentation" and "3.50 GiB unused" in found.what


def test_free_but_fails():
    """The card is all but empty; page-locked memory beyond what the machine has is refused with CUDA's out of memory."""
    error, found = failure("denoise high", lambda: torch.empty(2**46, dtype=torch.uint8, pin_memory=True))
    assert "CUDA error: out of memory" in str(error)
    assert found.cause == "host memory full" and "RAM" in found.what
    assert float(torch.ones(8, device=DEVICE).sum()) == 8, "the error is not sticky"


def test_another_process():
    with another_process(2 * GIB) as pid:
        error, found = failure("text", lambda: torch.empty(4 * GIB, dtype=torch.uint8, device=DEVICE))
    assert isinstance(error, torch.OutOfMemoryError)
    assert found.cause == "another process"
    print("the driver names it here" if str(pid) in found.what else "the driver hides process ids here")


def test_a_process_that_gets_no_room_for_cuda_itself():
    code = (
        "import torch\n"
        "from wanfit.memory.explain import explain\n"
        "from wanfit.memory.facts import gather\n"
        "try:\n"
        "    torch.zeros(1, device='cuda')\n"
        "except RuntimeError as error:\n"
        "    found = explain(error, gather(torch.device('cuda', 0), torch.bfloat16))\n"
        "    print(found.cause, '|', found)\n"
    )
    with another_process(100 * MIB):
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout, ran.stderr[-1000:]
    print(ran.stdout)
    assert ran.stdout.startswith(("another process", "vram full"))


def test_under_cuda_malloc_async():
    """The other allocator's text; its record, with what it does not tell; a purge gives its pool back."""
    code = """
import torch
from wanfit.memory.explain import explain
from wanfit.memory.facts import gather
from wanfit.memory.record import MemoryRecord
from wanfit.memory.release import SCOPES, purge
device = torch.device("cuda", 0)
assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
with MemoryRecord(device) as record:
    record.begin("load")
    held = torch.empty(2**30, dtype=torch.uint8, device=device)
    try:
        torch.empty(2**38, dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError as error:
        print(explain(error, gather(device, torch.bfloat16, record)).cause)
(stage,) = record.stages
print(stage.allocated_peak >= 2**30, stage.reserved_peak >= 2**30, stage.device_used_peak >= 2**30, sorted(record.unread))
del held
report = purge(device, list(SCOPES))
print(report.before.reserved >= 2**30, report.after.reserved < 2**28)
"""
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr[-2000:]
    cause, peaks, purged = ran.stdout.strip().splitlines()
    assert cause == "vram full" and peaks.startswith("True True True") and "'inactive'" in peaks
    assert purged == "True True"
