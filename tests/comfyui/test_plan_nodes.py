"""Plan and doctor in a graph on a real server."""

from __future__ import annotations

import io
from typing import Any

import pytest
from comfy_graphs import Graph, core_model, wanfit_model
from comfy_names import HIGH, LORA, LOW, TI2V, VAE
from comfyui_server import PromptFailed, Server
from PIL import Image

SIZE = {"width": 80, "height": 64, "length": 9}
REAL = {"width": 1280, "height": 720, "length": 81}


def plan(graph: Graph, **changes: Any) -> list[Any]:
    given = {
        "preset": "i2v-a14b:fp8", "policy": "auto", "vram": 0.0, "ram": 0.0, "keep": "size", "adapt": True, **SIZE,
    }  # fmt: skip
    return graph.add("WanFitPlan", **(given | changes))


def said(results: Any, node: list[Any]) -> str:
    return results.entry["outputs"][node[0]]["text"][0]


def test_a_graph_sizes_itself(run: Any, server: Server) -> None:
    """Width, height and length of the plan go into the core's own node, whose latents are sampled."""
    graph = Graph()
    model = wanfit_model(graph, HIGH, LOW)
    node = plan(graph, model=model, model_low=[model[0], 1])
    conditioning = [graph.add("TestConditioning", seed=seed) for seed in (1, 2)]
    video = graph.add(
        "WanImageToVideo", positive=conditioning[0], negative=conditioning[1],
        vae=graph.add("VAELoader", vae_name=VAE), width=[node[0], 3], height=[node[0], 4], length=[node[0], 5],
        batch_size=1, start_image=graph.add("EmptyImage", width=80, height=64, batch_size=1, color=0x808080),
    )  # fmt: skip
    result = graph.add(
        "KSampler", model=model, positive=video, negative=[video[0], 1], latent_image=[video[0], 2], seed=7, steps=2,
        cfg=3.0, sampler_name="euler", scheduler="simple", denoise=1.0,
    )  # fmt: skip
    graph.add("TestSaveTensor", latent=result, name="sized")
    graph.add("TestSaveTensor", image=[node[0], 1], name="chart")
    results = run(graph)
    assert results["sized"].shape[-3:] == (3, 8, 10)
    text = said(results, node)
    assert HIGH in text and LOW in text and "verdict: fits" in text
    assert results["chart"].std() > 0.05
    (shown,) = results.entry["outputs"][node[0]]["images"]
    picture = server.get(f"/view?filename={shown['filename']}&type={shown['type']}&subfolder={shown['subfolder']}")
    assert Image.open(io.BytesIO(picture)).size[0] > 600


@pytest.mark.parametrize("keep", ["size", "length"])
def test_what_does_not_fit_comes_out_smaller(run: Any, keep: str) -> None:
    """A stated card of 4 GiB: the adapted numbers go into a node of the core, whose latents have their shape."""
    graph = Graph()
    node = plan(graph, vram=4.0, ram=32.0, keep=keep, **REAL)
    latent = graph.add(
        "EmptyHunyuanLatentVideo", width=[node[0], 3], height=[node[0], 4], length=[node[0], 5], batch_size=1
    )
    graph.add("TestSaveTensor", latent=latent, name="adapted")
    results = run(graph)
    frames, height, width = results["adapted"].shape[-3:]
    text = said(results, node)
    assert "adapted to " in text and f"{8 * width}x{8 * height}, {4 * frames - 3} frames" in text
    if keep == "size":
        assert (width, height) == (160, 90) and frames < 21
    else:
        assert frames == 21 and width < 160


def test_without_adapting_the_numbers_are_as_given(run: Any) -> None:
    graph = Graph()
    node = plan(graph, vram=4.0, ram=32.0, adapt=False, **REAL)
    latent = graph.add("EmptyHunyuanLatentVideo", width=[node[0], 3], height=64, length=5, batch_size=1)
    graph.add("TestSaveTensor", latent=latent, name="kept")
    results = run(graph)
    assert results["kept"].shape[-1] == 160
    assert "verdict: does not fit" in said(results, node) and "what fits: " in said(results, node)


def test_a_batch_in_8_bits_with_a_lora(run: Any) -> None:
    """All three count: for two videos more is needed, with packed heads less, and the LoRA of the MODEL is read."""
    needed: dict[str, float] = {}
    for name, options in {"one": {}, "two": {"batch_size": 2}, "packed": {"packed": True}}.items():
        graph = Graph()
        node = plan(graph, vram=24.0, ram=64.0, adapt=False, **REAL, **options)
        graph.add("TestSaveTensor", image=[node[0], 1], name="chart")
        text = said(run(graph), node)
        line = next(line for line in text.splitlines() if line.startswith("denoise high "))
        needed[name] = float(line.split()[2])
        assert ("2 videos at a time" in text) == (name == "two")
        assert ("packed in 8 bits" in text) == (name == "packed")
    assert needed["packed"] < 0.8 * needed["one"] < 0.8 * 0.7 * needed["two"]
    graph = Graph()
    model = graph.add("LoraLoaderModelOnly", model=wanfit_model(graph, HIGH), lora_name=LORA, strength_model=1.0)
    node = plan(graph, model=model)
    graph.add("TestSaveTensor", image=[node[0], 1], name="chart")
    assert HIGH in said(run(graph), node)


def refused(server: Server, graph: Graph) -> str:
    with pytest.raises(PromptFailed) as caught:
        server.run(graph.prompt)
    return str(caught.value)


def test_bad_input_in_the_words_of_the_graph(server: Server) -> None:
    graph = Graph()
    plan(graph, model=core_model(graph, HIGH))
    assert "model is not from WanFit Load Wan Model" in refused(server, graph)
    graph = Graph()
    plan(graph, model=wanfit_model(graph, TI2V), width=80)
    text = refused(server, graph)
    assert "size_invalid" in text and "multiple of 32" in text
    graph = Graph()
    plan(graph, model_low=wanfit_model(graph, HIGH))
    assert "model_low is connected and model is not" in refused(server, graph)


@pytest.mark.parametrize("disk", [False, True])
def test_the_doctor_names_comfyuis_options_and_the_machine(run: Any, disk: bool) -> None:
    graph = Graph()
    node = graph.add("WanFitDoctor", disk=disk)
    text = said(run(graph), node)
    for part in ("ComfyUI", "--cpu", "software", "torch", "kernels", "allocator", "memory", "RAM"):
        assert part in text, text
    assert ("\ndisk\n" in text) == disk
