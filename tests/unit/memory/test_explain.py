"""Every cause on the exception as it is really raised here, or on a text quoted from PyTorch's source or a report."""

import errno
import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from wanfit.cli.words import FLAGS
from wanfit.errors import in_words
from wanfit.memory.explain import Facts, explain
from wanfit.memory.facts import gather
from wanfit.tiny.models import write_tiny_models

GIB = 2**30


def native(asked: str, total: str, free: str, in_use: str, allocated: str, unused: str, more: str = "") -> Exception:
    """c10/cuda/CUDACachingAllocator.cpp, `TORCH_CHECK_WITH(OutOfMemoryError, ...)`, torch 2.4 to 2.13."""
    return torch.OutOfMemoryError(
        f"CUDA out of memory. Tried to allocate {asked}. GPU 0 has a total capacity of {total} of which {free} is free. "
        f"{more}Including non-PyTorch memory, this process has {in_use} memory in use. Of the allocated memory "
        f"{allocated} is allocated by PyTorch, and {unused} is reserved by PyTorch but unallocated. If reserved but "
        "unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid "
        "fragmentation."
    )


def cause(error: BaseException, facts: Facts | None = None) -> str:
    found = explain(error, facts)
    assert found is not None
    assert found.what and found.change and "\n" not in str(found)
    return found.cause


def raised(call) -> BaseException:
    with pytest.raises(BaseException) as caught:
        call()
    return caught.value


RECORDED = json.loads((Path(__file__).parent / "cuda_texts.json").read_text(encoding="utf-8"))["texts"]
NOT_FROM_THE_ALLOCATOR = ("pinned", "no room for cuBLAS")


@pytest.mark.parametrize(
    ("name", "expected", "free"),
    [
        ("fraction, load", "vram full", 137 * GIB),
        ("fraction, forward", "vram full", 137 * GIB),
        ("fraction, fragmented", "fragmentation", 132 * GIB),
        ("whole card, fragmented", "fragmentation", 2 * GIB),
        ("whole card, full", "vram full", 139 * GIB),
        ("another process", "another process", 3 * GIB),
        ("cudaMallocAsync", "vram full", 2**23),
        ("pinned", "host memory full", 139 * GIB),
        ("no room for cuBLAS", "vram full", 2**25),
    ],
)
def test_texts_as_a_card_really_gave_them(name, expected, free):
    kind = RuntimeError if name in NOT_FROM_THE_ALLOCATOR else torch.OutOfMemoryError
    assert cause(kind(RECORDED[name]), Facts(stage="denoise high", vram_free=free, vram_total=150109880320)) == expected


def test_vram_is_full_while_loading():
    """Document 000 of lore.md: everything allocated, nothing free; not fragmentation."""
    error = native("26.00 MiB", "23.52 GiB", "0 bytes", "23.45 GiB", "23.04 GiB", "105.00 MiB")
    assert cause(error, Facts(stage="text")) == "vram full"
    assert "<text> to cpu" in str(explain(error, Facts(stage="text")))


def test_vram_is_full_in_the_middle_of_the_sampling_and_the_plan_is_quoted():
    """ShmuelRonen/LatentSyncWrapper#53: 2.22 GiB free for a request of 7.2 GiB."""
    error = native("7.20 GiB", "24.00 GiB", "2.22 GiB", "21.70 GiB", "21.10 GiB", "120.00 MiB")
    found = explain(error, Facts(stage="denoise high", planned_vram=5 * GIB))
    assert found is not None and found.cause == "vram full"
    assert "wanfit plan says what fits" in in_words(found.change, FLAGS), "in ComfyUI it is the node"
    assert "7.20 GiB" in found.what and "denoise high" in found.what and "plan said 5.00 GiB" in found.what


def test_fragmentation_after_several_runs():
    error = native("1.50 GiB", "24.00 GiB", "600.00 MiB", "23.30 GiB", "17.10 GiB", "5.60 GiB")
    assert cause(error) == "fragmentation"


@pytest.mark.parametrize(
    ("asked", "total", "free", "allocated", "unused"),
    [
        ("546.00 MiB", "15.77 GiB", "514.19 MiB", "13.73 GiB", "736.86 MiB"),  # kaito-project/kaito#976
        ("1.70 GiB", "6.00 GiB", "0 bytes", "2.93 GiB", "2.30 GiB"),  # carolchenyx/MGFN.#35
        ("5.06 GiB", "15.56 GiB", "2.74 GiB", "6.55 GiB", "5.53 GiB"),  # pytorch/pytorch#177406, see below
    ],
)
def test_pieces_of_the_order_of_the_request_are_no_fragmentation(asked, total, free, allocated, unused):
    """The request would have fitted into the pieces, and then an eighth of the card would not have been left."""
    error = native(asked, total, free, total, allocated, unused)
    found = explain(error)
    assert found is not None and found.cause == "vram full" and "in pieces too small" in found.what


def test_free_but_fails_is_host_memory():
    """deepbeepmeep/Wan2GP#671: 854 MiB refused with 10.23 GiB of VRAM free, at 30.9 of 31.9 GB of RAM."""
    error = native("854.00 MiB", "15.92 GiB", "10.23 GiB", "4.90 GiB", "4.50 GiB", "200.00 MiB")
    found = explain(error, Facts(ram_free=GIB))
    assert found is not None and found.cause == "host memory full"
    assert "RAM" in found.what and "1.00 GiB of RAM" in found.what
    assert ".wslconfig" in str(explain(error, Facts(wsl=True))), "komikndr/raylight#108"


def test_nothing_is_short_and_yet_it_fails():
    """GKartist75/wan2gp-desktop#64: SageAttention compiled for torch 2.9 under torch 2.10, on a 4090."""
    error = native("26.00 MiB", "23.99 GiB", "21.48 GiB", "2.30 GiB", "872.49 MiB", "90.00 MiB")
    assert cause(error, Facts(ram_free=30 * GIB)) == "earlier CUDA error"
    assert "compiled for another torch" in str(explain(error, Facts(ram_free=30 * GIB)))
    assert cause(error, Facts(ram_free=30 * GIB, commit_free=GIB)) == "host memory full", "the page file is"
    assert cause(error, Facts(ram_free=GIB)) == "host memory full"


def test_a_limit_of_the_program_is_no_host_problem():
    """With a memory fraction the same message names what is allowed, and the card has plenty free."""
    error = native(
        "854.00 MiB", "139.81 GiB", "120.00 GiB", "11.50 GiB", "11.10 GiB", "90.00 MiB", "12.00 GiB allowed; "
    )
    assert cause(error) == "vram full"


def test_another_process_holds_the_card():
    """vLLM report: `Process 2752205 has 91.82 GiB memory in use`, the figures of a 24 GiB card."""
    more = "Process 4711 has 14.20 GiB memory in use. "
    error = native("1.25 GiB", "23.65 GiB", "1.18 GiB", "8.10 GiB", "7.60 GiB", "120.54 MiB", more)
    found = explain(error, Facts(others=((4711, "game.exe", 14 * GIB),)))
    assert found is not None and found.cause == "another process" and "game.exe 4711" in found.what


def test_the_3d_convolution_of_torch_2_9_in_the_decode():
    """pytorch/pytorch#166643."""
    error = native("7.27 GiB", "23.65 GiB", "2.18 GiB", "21.10 GiB", "3.60 GiB", "120.54 MiB")
    facts = Facts(stage="decode and save", conv3d_trap="torch 2.9.0 does not use cuDNN 91002 for 16-bit convolutions")
    assert cause(error, facts) == "conv3d workspace"
    assert cause(error, Facts(stage="denoise low", conv3d_trap="x")) == "vram full"
    # pytorch/pytorch#177406: the 3D convolution asks for 5.06 GiB; the pieces beside it are not what is wrong.
    error = native("5.06 GiB", "15.56 GiB", "2.74 GiB", "12.37 GiB", "6.55 GiB", "5.53 GiB")
    assert cause(error, facts) == "conv3d workspace"


def test_under_cuda_malloc_async():
    """c10/cuda/CUDAMallocAsyncAllocator.cpp; quoted in a ComfyUI report on a 16 GB card."""
    error = torch.OutOfMemoryError(
        "Allocation on device 0 would exceed allowed memory. (out of memory)\nCurrently allocated     : 12.43 GiB\n"
        "Requested               : 4.07 GiB\nDevice limit            : 16.00 GiB\nFree (according to CUDA): 0 bytes\n"
        "PyTorch limit (set by user-supplied memory fraction)\n                        : 17179869184.00 GiB"
    )
    found = explain(error)
    assert found is not None and found.cause == "vram full" and "4.07 GiB" in found.what and "12.43 GiB" in found.what


def test_page_locking_fails():
    """Comfy-Org/ComfyUI#10662: torch's text for cudaErrorMemoryAllocation, outside the caching allocator."""
    text = "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call"
    assert cause(RuntimeError(text), Facts(vram_free=9 * GIB)) == "host memory full"
    assert cause(RuntimeError(text), Facts(vram_free=2**20)) == "vram full"


@pytest.mark.parametrize(
    "call",
    [lambda: torch.empty(2**46, dtype=torch.uint8), lambda: bytearray(2**55), lambda: np.empty(2**55, dtype=np.uint8)],
    ids=["torch", "python", "numpy"],
)
def test_ram_is_really_full(call):
    error = raised(call)
    assert cause(error, Facts(stage="text", ram_free=GIB)) == "host memory full"
    assert cause(OSError(errno.ENOMEM, "Cannot allocate memory")) == "host memory full"


LIMITED = """
import resource, sys
from pathlib import Path
from wanfit.errors import RunError
from wanfit.pipeline.files import find_model
from wanfit.pipeline.generate import generate
from wanfit.pipeline.placement import choose_placement
from wanfit.pipeline.request import Request

folder, boat, *stages = sys.argv[1:]
NONE = resource.RLIM_INFINITY

def limit(at):
    def tell(text):
        if text == f"stage: {at}":
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + 2 * 2**20, NONE))
    return tell

request = Request(
    prompt="a boat", out=Path(folder) / "a.mp4", image=Path(boat), width=128, height=96, num_frames=5, steps=2
)
for stage in stages:
    try:
        generate(find_model(Path(folder)), request, choose_placement("cpu"), tell=limit(stage))
    except RunError as error:
        resource.setrlimit(resource.RLIMIT_AS, (NONE, NONE))
        print(f"{error.code}|{error.stage}|{error.what}|{error.change}")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="RLIMIT_AS")
def test_ram_runs_out_for_real_in_each_stage(tmp_path):
    """The system refuses the process more address space from the stage on: real allocations of a real run fail."""
    write_tiny_models(tmp_path)
    boat = Path(__file__).resolve().parents[3] / "assets" / "boat.jpg"
    stages = ["text", "denoise high", "denoise low", "decode and save"]
    ran = subprocess.run(
        [sys.executable, "-c", LIMITED, str(tmp_path), str(boat), *stages],
        capture_output=True,
        text=True,
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"},  # tensors come from the system, not from freed heap
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    said = [line.split("|") for line in ran.stdout.strip().splitlines() if "|" in line]
    assert [(code, where) for code, where, *_ in said] == [("run_failed", stage) for stage in stages]
    print("", *(f"{what}. {change}" for *_, what, change in said), sep="\n")
    assert all("RAM is full for this program" in what and "it is not VRAM" in what for _, _, what, _ in said)
    assert all("ulimit -v" in change for *_, change in said)
    assert ["steps are kept" in change for *_, change in said] == [False, False, True, True]
    assert not (tmp_path / "a.mp4").exists() and (tmp_path / "a.resume.safetensors").exists()


def test_the_page_file_is_full():
    """Comfy-Org/ComfyUI#8065: Rust's text of ERROR_COMMITMENT_LIMIT through safetensors, and Python's own."""
    text = "The paging file is too small for this operation to complete. (os error 1455)"
    assert cause(OSError(text)) == "page file full"
    error = OSError("The paging file is too small for this operation to complete")
    assert cause(error) == "page file full"


def test_comfyui_pinned_memory():
    """Comfy-Org/ComfyUI#14250."""
    found = explain(RuntimeError("HostBuffer.read_file_slice failed"), Facts(aimdo="0.9.1"))
    assert found is not None and "--disable-pinned-memory" in found.change and "0.9.1" in found.what


def test_float8_in_triton_on_ampere():
    """kijai/ComfyUI-WanVideoWrapper#1030."""
    text = "type fp8e4nv not supported in this architecture. The supported fp8 dtypes are ('fp8e4b15', 'fp8e5')"
    assert cause(ValueError(text)) == "float8 kernel"


@pytest.mark.parametrize(
    ("channels", "weight", "expected"),
    [(16, (48, 48, 1, 1, 1), "wrong VAE"), (48, (16, 16, 1, 1, 1), "wrong VAE"),
     (16, (64, 36, 1, 2, 2), "wrong model"), (36, (64, 16, 1, 2, 2), "wrong model"), (68, (64, 36, 1, 2, 2), "wrong model")],
)  # fmt: skip
def test_a_part_of_another_model(channels, weight, expected):
    error = raised(lambda: torch.nn.functional.conv3d(torch.zeros(1, channels, 3, 8, 8), torch.zeros(weight)))
    assert cause(error) == expected


def test_a_size_that_is_no_multiple():
    """kijai/ComfyUI-WanVideoWrapper#1296."""
    assert cause(raised(lambda: torch.zeros(1, 4, 67) + torch.zeros(1, 4, 66))) == "size"
    assert explain(raised(lambda: torch.zeros(1, 4, 67) + torch.zeros(1, 4, 7))) is None


@pytest.mark.parametrize(
    "value",
    ["expandable_segments:true", "max_split_size_mb:5", "garbage_collection_threshold:2", "max_split_size_mb",
     "roundup_power2_divisions:3"],
)  # fmt: skip
def test_allocator_settings_that_torch_rejects(value):
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None:
        pytest.skip(f"torch {torch.__version__} parses these settings on CUDA builds only")
    assert cause(raised(lambda: set_settings(value))) == "allocator settings"


def _die(_connection) -> None:
    os._exit(1)


def test_a_worker_that_died_and_the_first_error_counts():
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    worker = context.Process(target=_die, args=(there,))
    worker.start()
    there.close()
    worker.join()
    end = raised(here.recv)
    assert isinstance(end, EOFError | ConnectionResetError) and cause(end) == "a worker died"

    def cleaning_up() -> None:
        try:
            raise native("26.00 MiB", "23.52 GiB", "0 bytes", "23.45 GiB", "23.04 GiB", "105.00 MiB")
        finally:
            raise BrokenPipeError(32, "Broken pipe")

    assert cause(raised(cleaning_up)) == "vram full"


def test_two_devices():
    """kijai/ComfyUI-WanVideoWrapper#195, in torch's words."""
    text = "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cuda:1!"
    assert cause(RuntimeError(text)) == "two devices"


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), ValueError("no"), KeyError("x"), OSError(2, "no file")]
)
def test_what_is_not_known_is_not_explained(error):
    assert explain(error) is None


def test_the_facts_are_read_on_any_machine():
    facts = gather(torch.device("cpu"), torch.float32)
    assert (facts.ram_free or 0) > 0 and facts.vram_free is None and facts.conv3d_trap == ""


def test_more_than_the_whole_card_is_no_fault_of_other_programs():
    """The text of an H200 under cudaMallocAsync with 1 GiB of its own, and another program on the card."""
    text = RECORDED["cudaMallocAsync"].replace("124.81 GiB", "1.00 GiB")
    assert "Requested               : 69.34 GiB" in text and "1.00 GiB" in text
    facts = Facts(stage="load", vram_total=150109880320, others=((4711, "python", 128 * GIB),))
    assert cause(torch.OutOfMemoryError(text), facts) == "another process"
    assert cause(torch.OutOfMemoryError(text.replace("69.34 GiB", "256.00 GiB")), facts) == "vram full"
