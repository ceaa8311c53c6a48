"""Real ComfyUI servers on the CPU, with the pack as the registry would get it, and tiny models."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from comfy_names import (  # noqa: E402
    DEEP,
    HIGH,
    HIGH_FP8,
    HIGH_FP8_PLAIN,
    HIGH_GGUF,
    HIGH_QUANT,
    HIGH_QUANT_PLAIN,
    LORA,
    LORA_TOO_LARGE,
    LOW,
    LOW_GGUF,
    T2V_HIGH,
    T2V_LOW,
    TI2V,
    VAE,
    VAE_22,
    WAN21,
    is_old,
)
from comfyui_server import Server, Tree, find_trees, prepare_base  # noqa: E402
from PIL import Image  # noqa: E402
from wan_files import header_of, write_header  # noqa: E402

from wanfit.checkpoint import open_checkpoint  # noqa: E402
from wanfit.checkpoint.structure import vae_tensors  # noqa: E402
from wanfit.quant import dequantize  # noqa: E402
from wanfit.tiny.gguf_layout import write_gguf  # noqa: E402
from wanfit.tiny.layouts import write_comfy_quant, write_comfy_scaled, write_plain  # noqa: E402
from wanfit.tiny.models import tiny_transformer, tiny_vae  # noqa: E402
from wanfit.tiny.text import TinyShape, make_text  # noqa: E402
from wanfit.tiny.text import write_gguf as write_text_gguf  # noqa: E402

TREES = find_trees()


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A models folder that all servers share, except for the VAE, whose width 0.3.64 fixes."""
    folder = tmp_path_factory.mktemp("models")
    for kind in ("diffusion_models", "text_encoders", "loras", "vae", "clip_vision"):
        (folder / kind).mkdir()
    experts = folder / "diffusion_models"
    high, low = tiny_transformer(seed=1), tiny_transformer(seed=2)
    bf16 = torch.bfloat16
    write_plain(experts / HIGH, high, dtype=bf16)
    write_plain(experts / LOW, low, dtype=bf16)
    write_comfy_scaled(experts / HIGH_FP8, high)
    write_comfy_quant(experts / HIGH_QUANT, high)
    for quantised, plain in ((HIGH_FP8, HIGH_FP8_PLAIN), (HIGH_QUANT, HIGH_QUANT_PLAIN)):
        with open_checkpoint(experts / quantised) as checkpoint:
            tensors = {name: dequantize(checkpoint.load(name), torch.float32).clone() for name in checkpoint.tensors}
        save_file(tensors, str(experts / plain))
    write_gguf(experts / HIGH_GGUF, high, "Q8_0")
    write_gguf(experts / LOW_GGUF, low, "Q4_K_M")
    write_plain(experts / T2V_HIGH, tiny_transformer("t2v-a14b", seed=3), dtype=bf16)
    write_plain(experts / T2V_LOW, tiny_transformer("t2v-a14b", seed=4), dtype=bf16)
    write_plain(experts / DEEP, tiny_transformer("t2v-a14b", seed=7, num_layers=8), dtype=bf16)
    write_plain(experts / TI2V, tiny_transformer("ti2v-5b", seed=5), dtype=bf16)
    write_plain(experts / WAN21, tiny_transformer("i2v-14b", seed=6), dtype=bf16)
    save_file(_lora(high), str(folder / "loras" / LORA))
    too_large = {name: tensor * 1e25 for name, tensor in _lora(high).items()}
    save_file(too_large, str(folder / "loras" / LORA_TOO_LARGE))
    text = make_text(TinyShape(d_kv=1, num_heads=64, num_layers=24), seed=8)
    write_text_gguf(text, folder / "text_encoders", "Q8_0")
    return folder


def _lora(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """LoRAs on every linear, of the blocks and of the rest, and differences on biases and norms of block 0."""
    generator = torch.Generator().manual_seed(9)
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        layer = "diffusion_model." + name.rpartition(".")[0]
        if name.endswith(".weight") and weight.ndim == 2:
            rows, columns = weight.shape
            tensors[f"{layer}.lora_down.weight"] = torch.randn(4, columns, generator=generator) / columns**0.5
            tensors[f"{layer}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) * 0.2
            tensors[f"{layer}.alpha"] = torch.tensor(2.0)
        elif name.startswith("blocks.0.") and name.endswith(("bias", "norm_q.weight")):
            suffix = "diff_b" if name.endswith("bias") else "diff"
            tensors[f"{layer}.{suffix}"] = torch.randn(weight.shape, generator=generator) * 0.1
    return tensors


@pytest.fixture(scope="session", params=TREES or [None], ids=lambda tree: tree.version if tree else "no ComfyUI")
def tree(request: pytest.FixtureRequest) -> Tree:
    if request.param is None:
        pytest.skip("no ComfyUI source tree: set COMFYUI_PATH, or put one below ~/comfyui")
    return request.param


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The zip that the registry would get: `comfy node validate` and `comfy node pack` over this working tree."""
    source = tmp_path_factory.mktemp("package")
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, source / name)
    for command in (["git", "init", "--quiet"], ["git", "add", "--all"]):
        subprocess.run(command, cwd=source, check=True)
    comfy = [str(Path(sys.executable).with_name("comfy")), "--skip-prompt", "--no-enable-telemetry", "node"]
    said = [
        subprocess.run([*comfy, verb], cwd=source, capture_output=True, text=True, check=True)
        for verb in ("validate", "pack")
    ]
    assert "All validation checks passed" in said[0].stdout + said[0].stderr
    assert "issues" not in said[0].stdout + said[0].stderr
    return source / "node.zip"


@pytest.fixture(scope="session")
def server(tree: Tree, package: Path, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    base = tmp_path_factory.mktemp(f"base-{tree.version}")
    prepare_base(base, {"test_pack": Path(__file__).parent / "pack"})
    shutil.unpack_archive(package, base / "custom_nodes" / "wanfit")
    for file in tiny_models.rglob("*.*"):
        os.link(file, base / "models" / file.relative_to(tiny_models))
    write_plain(base / "models" / "vae" / VAE, tiny_vae(base_dim=96 if is_old(tree) else 16), dtype=torch.bfloat16)
    Image.linear_gradient("L").convert("RGB").save(base / "input" / "example.png")
    options = ("--cpu", "--preview-method", "latent2rgb")
    with Server(tree, base, options, env={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2")}) as running:
        yield running


@pytest.fixture(scope="session")
def large_vae(server: Server) -> Path:
    """The Wan 2.2 VAE in the one width that ComfyUI knows, as zeros: a hole in a file of 1.3 GiB."""
    shapes = vae_tensors("vae-2.2", base_dim=160, decoder_base_dim=256, latent_channels=48, pixel_channels=12)
    header = header_of({name: ("BF16", shape) for name, shape in shapes.items()})
    return write_header(server.base / "models" / "vae" / VAE_22, header)


@pytest.fixture
def run(server: Server) -> Any:
    """Run a graph's prompt, and load what it wrote: `run(graph)["name"]` is an array."""

    class Results:
        def __init__(self, entry: dict[str, Any]) -> None:
            self.entry = entry

        def __getitem__(self, name: str) -> np.ndarray:
            return np.load(server.base / "output" / f"{name}.npy")

    return lambda graph, timeout_s=120: Results(server.run(graph.prompt, timeout_s))
