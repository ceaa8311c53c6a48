"""Real servers on the card: with and without dynamic VRAM, and an old core.

One server for each way; small models, so that what is compared is the path and not the card's speed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from comfy_graphs import Graph, core_model, wanfit_model, watched
from comfy_names import (
    DEEP,
    HIGH,
    HIGH_FP8,
    HIGH_FP8_PLAIN,
    HIGH_GGUF,
    LORA,
    LOW,
    T2V_HIGH,
    T2V_LOW,
    TEXT,
    VAE,
    is_old,
    relative_error,
)
from comfy_required import told_and_planned
from comfyui_server import PromptFailed, Server, Tree, find_trees, prepare_base

from wanfit.memory.demand import Video
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.models import tiny_vae

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
WAYS = [
    (tree, options)
    for tree in find_trees()
    for options in ([()] if is_old(tree) else [(), ("--disable-dynamic-vram",)])
]
HALF = 2e-2  # fp16 or bf16, two ways to compute the same; measured 3e-3


@pytest.fixture(
    scope="module", params=WAYS or [None], ids=lambda way: " ".join((way[0].version, *way[1])) if way else "no ComfyUI"
)
def card(
    request: pytest.FixtureRequest, tiny_models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    if request.param is None:
        pytest.skip("no ComfyUI source tree: set COMFYUI_PATH, or put one below ~/comfyui")
    tree: Tree
    tree, options = request.param
    base = tmp_path_factory.mktemp(f"cuda-{tree.version}")
    prepare_base(base, {"wanfit": ROOT, "test_pack": Path(__file__).parent / "pack"})
    for file in tiny_models.rglob("*.*"):
        os.link(file, base / "models" / file.relative_to(tiny_models))
    width = 96 if is_old(tree) else 16
    write_plain(base / "models" / "vae" / VAE, tiny_vae(base_dim=width), dtype=torch.bfloat16)
    with Server(tree, base, options) as running:
        yield running


def result(server: Server, graph: Graph, name: str) -> np.ndarray:
    server.run(graph.prompt)
    return np.load(server.base / "output" / f"{name}.npy")


def sampled(server: Server, file: str, *, core: bool = False, lora: bool = False, **latent: int) -> np.ndarray:
    graph = Graph()
    model = core_model(graph, file) if core else wanfit_model(graph, file)
    if lora:
        model = graph.add("LoraLoaderModelOnly", model=model, lora_name=LORA, strength_model=0.8)
    graph.sample(model, "x", **latent)
    return result(server, graph, "x")


def allocated(server: Server) -> int:
    device = server.get("/system_stats")["devices"][0]
    return device["torch_vram_total"] - device["torch_vram_free"]


def rss(server: Server) -> int:
    return psutil.Process(server.pid).memory_info().rss


def test_the_way_is_the_one_meant(card: Server, request: pytest.FixtureRequest) -> None:
    dynamic = "DynamicVRAM support detected and enabled" in card.log
    assert dynamic == (not is_old(card.tree) and "--disable-dynamic-vram" not in request.node.name)
    assert card.get("/system_stats")["devices"][0]["type"] == "cuda"


@pytest.mark.parametrize("lora", [False, True])
def test_equals_core(card: Server, lora: bool) -> None:
    error = relative_error(sampled(card, HIGH, lora=lora), sampled(card, HIGH, core=True, lora=lora))
    print(f"\n{card.tree.version} bf16 {'with a LoRA ' if lora else ''}relative error {error:.2e}")
    assert error < HALF


def test_fp8_is_no_further_off_than_core(card: Server) -> None:
    """Both round activations to fp8's 3 bits on this card, each in its own way, and 0.3.64 norms and biases too. The
    reference are the same weights dequantised."""
    reference = sampled(card, HIGH_FP8_PLAIN, core=True)
    ours, core = (relative_error(sampled(card, HIGH_FP8, core=core), reference) for core in (False, True))
    print(f"\n{card.tree.version} fp8 from the dequantised file: {ours:.2e}, ComfyUI's own {core:.2e}")
    assert ours < 1.5 * core


def test_gguf_equals_core_within_its_quantisation(card: Server) -> None:
    error = relative_error(sampled(card, HIGH_GGUF), sampled(card, HIGH, core=True))
    print(f"\n{card.tree.version} Q8_0 relative error {error:.2e}")
    assert error < 5e-2


@pytest.mark.parametrize("policy", ["stream", "resident", "native"])
def test_policies(card: Server, policy: str) -> None:
    graph = Graph()
    placed = graph.add(
        "WanFitOffloadPolicy", model=wanfit_model(graph, HIGH, LOW), policy=policy, vram_budget=0.0, ram_budget=0.0,
        attention="comfyui",
    )  # fmt: skip
    graph.sample(placed, "placed")
    error = relative_error(result(card, graph, "placed"), sampled(card, HIGH))
    assert error < HALF if policy == "native" else error == 0


def test_text_encoder_and_decode(card: Server) -> None:
    """A GGUF text encoder where ComfyUI puts it, against the same on the CPU; and the decode against core's."""
    images = []
    for device in ("default", "cpu"):
        graph = Graph()
        clip = graph.add("WanFitTextEncoderLoader", text_encoder=TEXT, device=device)
        text = graph.add("CLIPTextEncode", clip=clip, text="a cat")
        latent = graph.add(
            "KSampler", model=wanfit_model(graph, HIGH), positive=text, negative=text, seed=1, steps=2, cfg=1.0,
            sampler_name="euler", scheduler="simple", denoise=1.0,
            latent_image=graph.add("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1),
        )  # fmt: skip
        vae = graph.add("VAELoader", vae_name=VAE)
        for name, node, more in (("ours", "WanFitVAEDecode", {"tile_size": 0}), ("core", "VAEDecode", {})):
            graph.add("TestSaveTensor", image=graph.add(node, samples=latent, vae=vae, **more), name=name)
        ours = result(card, graph, "ours")
        images.append(ours)
        core = np.load(card.base / "output" / "core.npy")
        error = relative_error(ours, core)
        print(
            f"\n{card.tree.version} decode, {device} text: {error:.1e} from core, at most {np.abs(ours - core).max():.1e}"
        )
        assert error < 1e-2  # bf16, other convolution shapes
    error = relative_error(images[0], images[1])
    print(f"\n{card.tree.version} text on the card and on the CPU: the pictures differ by {error:.1e}")
    assert error < 5e-2


def test_cancel_in_a_step(card: Server) -> None:
    """Inside of block 3 of 8 of the third forward: no other block is computed, and the memory comes back."""
    expected = sampled(card, HIGH)
    held, resident = allocated(card), rss(card)
    graph = Graph()
    graph.sample(watched(graph, wanfit_model(graph, DEEP), "watch", "interrupt", forward=2, block=3, times=1), "x")
    entry = card.wait(card.queue(graph.prompt), 30)
    assert any(kind == "execution_interrupted" for kind, _ in entry["status"]["messages"])
    log = (card.base / "output" / "watch.txt").read_text().split("\n")
    assert log.count("end 1.7") == 1
    after = [line for line in log[log.index("interrupt 2.3") + 1 :] if line.startswith("end")]
    assert after in ([], ["end 2.3"])
    stopped = allocated(card)
    assert (sampled(card, HIGH) == expected).all()
    print(f"\n{card.tree.version} allocated {held / MIB:.2f} before, {stopped / MIB:.2f} after cancel, "
          f"{allocated(card) / MIB:.2f} MiB after the next prompt; RSS {(rss(card) - resident) / MIB:+.1f} MiB")  # fmt: skip
    assert allocated(card) - held < 2 * MIB


def test_ten_prompts_leave_memory_flat(card: Server) -> None:
    device, host = [], []
    for number in range(10):
        graph = Graph()
        graph.sample(wanfit_model(graph, HIGH, LOW), "flat", seed=100 + number)
        card.run(graph.prompt)
        device.append(allocated(card))
        host.append(rss(card))
    print(
        f"\n{card.tree.version} allocated MiB {[round(v / MIB, 2) for v in device]}, RSS MiB {[v // MIB for v in host]}"
    )
    assert max(device[2:]) - device[1] < MIB
    assert max(host[2:]) - host[1] < 48 * MIB


def test_out_of_memory_tightens_and_then_explains(card: Server) -> None:
    graph = Graph()
    graph.sample(wanfit_model(graph, DEEP), "plain")
    plain = result(card, graph, "plain")
    graph = Graph()
    graph.sample(watched(graph, wanfit_model(graph, DEEP), "oom", "oom", forward=2, block=3, times=1), "again")
    assert relative_error(result(card, graph, "again"), plain) < HALF
    graph = Graph()
    graph.sample(watched(graph, wanfit_model(graph, DEEP), "oom", "oom", forward=2, block=3, times=1000), "x")
    with pytest.raises(PromptFailed) as caught:
        card.run(graph.prompt)
    print(f"\n{card.tree.version} {caught.value}")
    assert "budget_exceeded" in str(caught.value) and "length" in str(caught.value)
    assert (sampled(card, HIGH) == sampled(card, HIGH)).all()


@pytest.mark.parametrize("file", [HIGH, HIGH_FP8, HIGH_GGUF])
def test_the_model_asks_for_what_the_plan_says(card: Server, file: str) -> None:
    told, planned = told_and_planned(card, file, "stream", card=False, video=Video(832, 480, 81, image=True))
    assert told == planned


@pytest.mark.parametrize(("sampler", "left"), [("KSampler", 64), ("KSampler", 8), ("WanFitSampler", 0)])
def test_a_full_card_is_explained(card: Server, sampler: str, left: int) -> None:
    """Held by another node, so that no cache can be freed; `left` in MiB. With nothing at all left KSampler fails before
    it knows the model, on its 20 bytes of noise levels: that one stays the core's own text."""
    graph = Graph()
    pair = wanfit_model(graph, T2V_HIGH, T2V_LOW)
    model = graph.add("TestFillDevice", model=pair, leave=left)
    node = graph.sample(model, "x", width=640, height=480, length=121)
    if sampler == "WanFitSampler":
        inputs = graph.prompt[node]["inputs"]
        kept = {key: inputs[key] for key in ("positive", "negative", "seed", "steps", "latent_image", "scheduler")}
        graph.prompt[node] = {
            "class_type": sampler,
            "inputs": kept | {
                "model_high": model, "model_low": [pair[0], 1], "cfg_high": 3.5, "cfg_low": 3.5, "sampler_name": "euler",
                "shift": 5.0, "boundary": 0.0, "switch_step": 2, "start_at_step": 0, "end_at_step": 10000,
                "add_noise": "enable", "return_with_leftover_noise": "disable", "save_every": 0, "resume": "off",
            },
        }  # fmt: skip
    with pytest.raises(PromptFailed) as caught:
        card.run(graph.prompt)
    said = str(caught.value)
    print(f"\n{card.tree.version} {sampler}, {left} MiB left: {said}")
    graph = Graph()
    graph.sample(graph.add("TestFillDevice", model=wanfit_model(graph, T2V_HIGH), leave=-1), "free")
    result(card, graph, "free")
    assert "[budget_exceeded]" in said or "[run_failed] The device memory is full" in said
    assert "smaller width" in said and "length" in said


def test_the_probe_reads_the_card_and_a_purge_gives_it_back(card: Server) -> None:
    """Under ComfyUI's own allocator settings, with and without its dynamic VRAM."""
    graph = Graph()
    sampler = graph.sample(wanfit_model(graph, HIGH, LOW), "x", seed=21)
    probed = graph.add("WanFitMemoryProbe", anything=[sampler, 0], label="sampled")
    purged = graph.add("WanFitPurge", anything=probed, release="all models")
    entry = card.run(graph.prompt)
    report = entry["outputs"][probed[0]]["text"][0]
    row = next(line for line in report.splitlines() if line.startswith("sampled  "))
    print(report, entry["outputs"][purged[0]]["text"][0], sep="\n\n")
    cells = row.split("  ")
    assert row.count("GiB") >= 4 and " - " not in row, "RAM, VRAM allocated and reserved, and what was planned"
    assert "not read: " in report
    assert len(cells) >= 7
    said = entry["outputs"][purged[0]]["text"][0]
    for counter in ("rss", "pinned", "allocated", "reserved", "device_used"):
        assert any(line.startswith(counter) for line in said.splitlines()), said
    assert allocated(card) < 256 * MIB
