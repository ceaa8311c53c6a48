"""The allocator's settings as torch itself takes them, limits of the host, and the disk's speed."""

import ast
import os
import re
from pathlib import Path

import pytest
import torch

from wanfit.memory.allocator import NEW, OLD, check_allocator
from wanfit.memory.doctor import examine, read_speed
from wanfit.memory.host import group_limits, in_wsl
from wanfit.memory.version_pairs import check_versions, fits_torch

MIB = 2**20


def states(environment, version="2.13.0", platform="linux") -> dict[str, str]:
    return {finding.text: finding.state for finding in check_allocator(environment, version, platform)}


@pytest.mark.parametrize(
    "value",
    ["expandable_segments:True", "expandable_segments:true", "max_split_size_mb:5", "max_split_size_mb:64",
     "garbage_collection_threshold:0.8", "garbage_collection_threshold:2", "roundup_power2_divisions:4",
     "roundup_power2_divisions:3", "roundup_power2_divisions:[256:1,512:2,>:8]", "max_split_size_mb",
     "max_split_size_mb=64", "expandable_segments:False,max_split_size_mb:512", "pinned_max_cached_size_mb:64"],
)  # fmt: skip
def test_a_value_is_called_wrong_where_torch_rejects_it(value):
    set_settings = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if set_settings is None:
        pytest.skip(f"torch {torch.__version__} parses these settings on CUDA builds only")
    try:
        set_settings(value)
        rejected = False
    except (ValueError, RuntimeError):
        rejected = True
    finally:
        set_settings("expandable_segments:False")
    assert ("wrong" in states({NEW: value}).values()) == rejected


def test_an_unknown_key_is_named():
    assert any("'foo'" in text and state == "wrong" for text, state in states({OLD: "foo:1"}).items())


def test_nothing_set_is_fine():
    assert list(states({}).values()) == ["ok"]


def test_which_name_counts():
    """pytorch/pytorch#183387: torch 2.9.1 reads this key for CUDA from the old name only."""
    value = "expandable_segments:True"
    assert any("ignores expandable_segments" in text for text in states({NEW: value}, "2.9.1"))
    assert not any("ignores" in text for text in states({NEW: value}, "2.13.0"))
    assert not any("ignores expandable" in text for text in states({OLD: value}, "2.9.1"))
    assert any("warns" in text for text in states({OLD: value}, "2.9.1"))
    assert not any("warns" in text for text in states({OLD: value}, "2.12.0"))
    assert any("does not read" in text for text in states({NEW: value}, "2.6.0"))
    assert any("both variables" in text for text in states({NEW: value, OLD: "max_split_size_mb:64"}))


def test_what_has_no_effect():
    value = "expandable_segments:True,max_split_size_mb:512"
    assert any("no effect on this system" in text for text in states({OLD: value}, platform="win32"))
    assert any("does not govern" in text for text in states({OLD: value}))
    asynchronous = states({OLD: "backend:cudaMallocAsync,max_split_size_mb:128,garbage_collection_threshold:0.8"})
    assert any("ignores max_split_size_mb, garbage_collection_threshold" in text for text in asynchronous)


@pytest.mark.parametrize(
    ("installed", "capability", "said"),
    [
        ({"torch": "2.8.0+cu128", "triton-windows": "3.5.0"}, (12, 0), 'install "triton-windows<3.5"'),
        ({"torch": "2.6.0+cu126", "triton": "3.3.0"}, (8, 9), "triton 3.3.0 with torch 2.6.0+cu126"),
        ({"torch": "2.11.0", "triton": "3.7.0"}, (8, 9), "newer than the one of torch 2.11"),
        ({"torch": "2.7.1+cu128", "triton-windows": "3.3.1.post19"}, (8, 6), "fp8e4nv"),
        ({"torch": "2.7.1+cu128", "triton": "3.3.1"}, (7, 5), "dropped this generation"),
        ({"torch": "2.8.0+cu128"}, None, "RAM is reported to grow"),
        ({"torch": "2.9.0+cu128", "sageattention": "2.2.0"}, (12, 0), "noise with this torch"),
        ({"torch": "2.6.0+cu124", "sageattention": "2.2.0"}, (9, 0), "noise or CUDA errors"),
        ({"torch": "2.7.0", "sageattention": "2.1.1"}, (7, 5), "1.0.6 is the last"),
        ({"torch": "2.10.0+cu130", "sageattention": "2.2.0+cu130torch2.9.0andhigher.post4"}, (8, 9), "compiled for torch 2.9"),
        ({"torch": "2.10.0", "comfy-aimdo": "0.4.7"}, (8, 6), "0.4.8 or newer"),
    ],
)  # fmt: skip
def test_versions_that_are_bad_together(installed, capability, said):
    findings = check_versions(installed, capability)
    assert any(said in finding.text for finding in findings), findings
    assert all(re.search(r"\(\S+/\S+#\d+", finding.text) for finding in findings), "each names its report"


@pytest.mark.parametrize(
    ("installed", "capability"),
    [
        ({"torch": "2.11.0+cu130", "triton": "3.6.0"}, (9, 0)),
        ({"torch": "2.9.1+cu128", "triton-windows": "3.5.1.post22", "sageattention": "2.2.0+cu128torch2.9.1"}, (8, 6)),
        ({"torch": "2.7.1+cu128", "triton": "3.3.1", "sageattention": "1.0.6"}, (8, 9)),
        ({"torch": "2.13.0+cpu"}, None),
        ({"torch": "2.10.0a0+git1234", "triton": "not a version", "comfy-aimdo": "0.5.2"}, (9, 0)),
    ],
)
def test_versions_that_are_good_together(installed, capability):
    assert check_versions(installed, capability) == []


def test_a_package_that_was_compiled_for_another_torch():
    assert not fits_torch("torch==2.6.0", "2.7.1+cu128")
    assert fits_torch("torch==2.7.1", "2.7.1+cu128") and fits_torch("torch>=2.4", "2.13.0+cpu")
    assert fits_torch('numpy<2; python_version < "3.9"', "2.7.1") and fits_torch("torch==2.6.0", "")


def test_control_groups_of_both_versions(tmp_path):
    proc, two = tmp_path / "proc", tmp_path / "two"
    (proc / "self").mkdir(parents=True)
    own = two / "box" / "run"
    own.mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("0::/box/run\n")
    for folder, limit in ((own, "max"), (two / "box", str(512 * MIB))):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(f"{300 * MIB}\n")
        (folder / "memory.stat").write_text(f"anon 1\nfile {100 * MIB}\n")
    (found,) = group_limits(two, proc)
    assert found.path == two / "box" and found.room == 312 * MIB
    one = tmp_path / "one"
    (one / "memory").mkdir(parents=True)
    (one / "memory" / "memory.limit_in_bytes").write_text(f"{256 * MIB}\n")
    (one / "memory" / "memory.usage_in_bytes").write_text(f"{250 * MIB}\n")
    (one / "memory" / "memory.stat").write_text(f"total_cache {50 * MIB}\n")
    (proc / "self" / "cgroup").write_text("5:cpu,memory:/gone\n")
    (found,) = group_limits(one, proc)
    assert found.room == 56 * MIB
    (one / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert group_limits(one, proc) == [], "more than the machine has is no limit"


def test_wsl_is_known_by_its_kernel(tmp_path):
    (tmp_path / "version").write_text("Linux version 5.15.153.1-microsoft-standard-WSL2 (gcc)\n")
    assert in_wsl(tmp_path)
    assert not in_wsl(tmp_path / "nowhere")


def test_reading_is_bounded(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(os.urandom(20 * MIB))
    assert read_speed(path).read == 20 * MIB
    speed = read_speed(path, limit=9 * MIB)
    assert speed.read == 9 * MIB and speed.bandwidth > 0


def test_a_machine_without_a_card_is_examined(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(os.urandom(MIB))
    findings = examine(tmp_path)
    topics = {finding.topic for finding in findings}
    assert {"software", "kernels", "allocator", "memory", "card", "disk"} <= topics
    assert any("GB/s" in finding.text for finding in findings)
    assert {finding.state for finding in findings} <= {"ok", "note", "warning", "wrong", "unread"}
    if not torch.cuda.is_available():
        assert any(finding.state == "unread" and finding.topic == "card" for finding in findings)
    assert any(finding.state == "wrong" for finding in examine(tmp_path / "missing"))


def test_wanfit_starts_no_process_of_its_own():
    """So there is no worker that could be left over, and nothing for the doctor to end. (Triton calls a compiler.)"""
    starters = {"subprocess", "multiprocessing", "torch.multiprocessing", "torch.distributed"}
    root = Path(__file__).resolve().parents[3]
    for path in [*(root / "src").rglob("*.py"), *(root / "nodes").rglob("*.py"), root / "__init__.py"]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name for name in named if name in starters or name.split(".")[0] in starters}, path
            assert not (isinstance(node, ast.alias | ast.Attribute) and "ProcessPoolExecutor" in ast.dump(node)), path
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
                assert not node.attr.startswith(("fork", "spawn", "exec", "popen", "system")), path
