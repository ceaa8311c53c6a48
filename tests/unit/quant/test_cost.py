"""What a dequantiser costs: as many torch operations for a large matrix as for a small one, and a bound on memory."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from wanfit.quant import FORMATS, StoredWeight, dequantize

NEEDS_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Bytes an element at the peak, a bfloat16 result (2) included. Measured, rounded up.
CPU_PEAK = {
    "f32": 2.0, "f16": 2.0, "bf16": 0.0, "f8_e4m3": 3.0, "f8_e5m2": 3.0, "int8": 3.0, "int8_convrot": 8.1,
    "mxfp8": 3.2, "nvfp4": 4.4, "q8_0": 3.2, "q5_1": 4.3, "q5_0": 4.2, "q4_1": 4.3, "q4_0": 4.2,
    "q6_k": 4.3, "q5_k": 4.3, "q4_k": 4.3, "q3_k": 4.4, "q2_k": 4.6, "iq4_xs": 4.2, "iq4_nl": 4.2,
}  # fmt: skip
CUDA_PEAK = {
    "f32": 2.1, "f16": 2.1, "bf16": 0.0, "f8_e4m3": 2.1, "f8_e5m2": 2.1, "int8": 2.1, "int8_convrot": 8.1,
    "mxfp8": 2.2, "nvfp4": 3.4, "q8_0": 2.2, "q5_1": 3.3, "q5_0": 3.2, "q4_1": 3.3, "q4_0": 3.2,
    "q6_k": 3.3, "q5_k": 3.4, "q4_k": 3.3, "q3_k": 3.4, "q2_k": 3.6, "iq4_xs": 3.2, "iq4_nl": 3.2,
}  # fmt: skip


def make(key: str, rows: int, columns: int) -> StoredWeight:
    shape = (rows, columns)
    if key == "int8_convrot":
        weight = make("int8", rows, columns)
        return StoredWeight("int8", shape, weight.data, weight.params, {"convrot_groupsize": 256})
    if key in ("f32", "f16", "bf16"):
        return StoredWeight(
            key,
            shape,
            torch.zeros(shape, dtype={"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[key]),
        )
    if key in ("f8_e4m3", "f8_e5m2", "mxfp8"):
        data = torch.zeros(shape, dtype=torch.uint8).view(
            torch.float8_e5m2 if key == "f8_e5m2" else torch.float8_e4m3fn
        )
        scale = torch.zeros(rows * columns // 32, dtype=torch.uint8) if key == "mxfp8" else torch.ones(())
        return StoredWeight(key, shape, data, {"scale": scale})
    if key == "int8":
        return StoredWeight(key, shape, torch.zeros(shape, dtype=torch.int8), {"scale": torch.ones(rows, 1)})
    if key == "nvfp4":
        scale = torch.zeros(rows * columns // 16, dtype=torch.uint8)
        return StoredWeight(
            key, shape, torch.zeros(rows, columns // 2, dtype=torch.uint8), {"scale": scale, "scale_2": torch.ones(())}
        )
    elements, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[key.upper()]]
    return StoredWeight(key, shape, torch.zeros(rows, columns // elements * size, dtype=torch.uint8))


ALL = [*FORMATS, "int8_convrot"]


class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("key", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operations_do_not_depend_on_the_size(key, dtype):
    counts = []
    dequantize(make(key, 128, 256), dtype)  # fills the cached tables
    for rows, columns in ((128, 256), (512, 1024)):
        with CountOperations() as counter:
            dequantize(make(key, rows, columns), dtype)
        counts.append(counter.names)
    assert counts[0] == counts[1]
    assert len(counts[0]) < 130


def peak_bytes_cpu(run) -> int:
    """The largest sum of living CPU allocations made by `run`, from the allocator's own events."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorder:
        result = run()
    events = recorder.profiler.kineto_results.events()
    living = peak = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        living += event.nbytes()
        peak = max(peak, living)
    # 0 for a bfloat16 weight: the result is the stored tensor
    assert peak >= result.numel() * result.element_size() or peak == 0, "the recorder saw the result"
    return peak


@pytest.mark.parametrize("key", ALL)
def test_peak_memory_on_the_cpu(key):
    weight = make(key, 256, 2048)
    dequantize(weight, torch.bfloat16)
    peak = peak_bytes_cpu(lambda: dequantize(weight, torch.bfloat16)) / (256 * 2048)
    assert peak <= CPU_PEAK[key]


@pytest.mark.cuda
@NEEDS_CUDA
@pytest.mark.parametrize("key", ALL)
def test_peak_memory_on_cuda(key):
    weight = make(key, 4096, 4096).to("cuda")
    dequantize(weight, torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    dequantize(weight, torch.bfloat16)
    peak = (torch.cuda.max_memory_allocated() - before) / 4096**2
    assert peak <= CUDA_PEAK[key]
