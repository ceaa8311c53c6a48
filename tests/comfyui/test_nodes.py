"""The nodes beside the loader, and bad input, in the words of the graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from comfy_graphs import Graph, core_model, wanfit_model
from comfy_names import HIGH, HIGH_GGUF, LOW, LOW_GGUF, T2V_HIGH, TEXT, VAE, WAN21, relative_error
from comfyui_server import PromptFailed, Server


def latent(graph: Graph, **changes: int) -> list[Any]:
    sizes = {"batch": 1, "channels": 16, "frames": 2, "height": 6, "width": 20, "seed": 5}
    return graph.add("TestLatent", **{**sizes, **changes})


@pytest.mark.parametrize("tile_size", [0, 128])
def test_decode_equals_core(run: Any, server: Server, tile_size: int) -> None:
    graph = Graph()
    source, vae = latent(graph), graph.add("VAELoader", vae_name=VAE)
    graph.add("TestSaveTensor", image=graph.add("VAEDecode", samples=source, vae=vae), name="core_image")
    ours = graph.add("WanFitVAEDecode", samples=source, vae=vae, tile_size=tile_size)
    graph.add("TestSaveTensor", image=ours, name="wanfit_image")
    results = run(graph)
    expected, actual = results["core_image"], results["wanfit_image"]
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() < 1e-4  # float32; other convolution shapes round differently


@pytest.mark.parametrize("policy", ["auto", "stream", "resident", "native"])
def test_a_policy_does_not_change_the_result(run: Any, policy: str) -> None:
    graph = Graph()
    placed = graph.add(
        "WanFitOffloadPolicy", model=wanfit_model(graph, HIGH, LOW), policy=policy, vram_budget=0.0, ram_budget=0.0,
        attention="sdpa",
    )  # fmt: skip
    graph.sample(placed, "placed")
    plain = Graph()
    plain.sample(core_model(plain, HIGH), "plain")
    assert relative_error(run(graph)["placed"], run(plain)["plain"]) < 1e-4


def test_text_encoder_from_gguf(run: Any, server: Server) -> None:
    """The 24 layers of ComfyUI's own UMT5, with tiny stored weights in their linears."""
    graph = Graph()
    clip = graph.add("WanFitTextEncoderLoader", text_encoder=TEXT, device="cpu")
    positive = graph.add("CLIPTextEncode", clip=clip, text="a cat")
    result = graph.add(
        "KSampler", model=wanfit_model(graph, HIGH), positive=positive, negative=positive, seed=1, steps=1, cfg=1.0,
        sampler_name="euler", scheduler="simple", denoise=1.0,
        latent_image=graph.add("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1),
    )  # fmt: skip
    graph.add("TestSaveTensor", latent=result, name="text")
    assert np.isfinite(run(graph)["text"]).all()


def test_probe_and_purge_in_a_graph_without_other_wanfit_nodes(run: Any, server: Server) -> None:
    graph = Graph()
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0xFFFFFF)
    first = graph.add("WanFitMemoryProbe", anything=image, label="made")
    purged = graph.add("WanFitPurge", anything=first, release="all models")
    second = graph.add("WanFitMemoryProbe", anything=purged, label="purged")
    graph.add("TestSaveTensor", image=second, name="passed")
    graph.add("TestSaveTensor", image=[second[0], 2], name="chart")
    results = run(graph)
    assert (results["passed"] == 1).all()
    height, width = results["chart"].shape[1:3]
    assert height > 400 and width > 600 and results["chart"].std() > 0.05
    outputs = results.entry["outputs"]
    report = outputs[second[0]]["text"][0]
    assert "made" in report and "purged" in report and "GiB" in report
    assert outputs[second[0]]["images"]
    assert outputs[purged[0]]["text"][0].count("RAM") == 2


@pytest.mark.parametrize("release", ["this model", "device cache", "host cache", "node cache"])
def test_purge_of_a_model(run: Any, server: Server, release: str) -> None:
    graph = Graph()
    purged = graph.add("WanFitPurge", anything=wanfit_model(graph, HIGH), release=release)
    graph.sample(purged, "purged")
    entry = run(graph).entry
    assert release in entry["outputs"][purged[0]]["text"][0]


def refused(server: Server, graph: Graph) -> str:
    with pytest.raises(PromptFailed) as caught:
        server.run(graph.prompt)
    return str(caught.value)


def test_experts_in_the_wrong_slots(server: Server) -> None:
    graph = Graph()
    graph.sample(wanfit_model(graph, LOW, HIGH), "x")
    text = refused(server, graph)
    assert "pair_mismatch" in text and "model_high" in text and "model_low" in text
    assert "transformer_2" not in text


def test_experts_of_two_models(server: Server) -> None:
    graph = Graph()
    graph.sample(wanfit_model(graph, T2V_HIGH, LOW), "x")
    assert "pair_mismatch" in refused(server, graph)


def test_a_missing_low_expert_is_an_error_only_when_it_is_used(server: Server) -> None:
    graph = Graph()
    graph.sample([wanfit_model(graph, HIGH)[0], 1], "x")
    assert server.wait(server.queue(graph.prompt))["outputs"] == {}  # the message goes to the web page alone


def test_policy_refuses_other_models(server: Server) -> None:
    graph = Graph()
    placed = graph.add(
        "WanFitOffloadPolicy", model=core_model(graph, HIGH), policy="auto", vram_budget=0.0, ram_budget=0.0,
        attention="comfyui",
    )  # fmt: skip
    graph.sample(placed, "x")
    text = refused(server, graph)
    assert "part_unsupported" in text and "WanFitLoader" in text


def test_native_policy_refuses_gguf(server: Server) -> None:
    graph = Graph()
    placed = graph.add(
        "WanFitOffloadPolicy", model=wanfit_model(graph, HIGH_GGUF, LOW_GGUF), policy="native", vram_budget=0.0,
        ram_budget=0.0, attention="comfyui",
    )  # fmt: skip
    graph.sample(placed, "x")
    assert "gguf" in refused(server, graph)


@pytest.mark.parametrize(("channels", "frames"), [(48, 3), (16, 0)])
def test_a_latent_that_does_not_fit_the_vae(server: Server, channels: int, frames: int) -> None:
    graph = Graph()
    source, vae = latent(graph, channels=channels, frames=frames), graph.add("VAELoader", vae_name=VAE)
    image = graph.add("WanFitVAEDecode", samples=source, vae=vae, tile_size=0)
    graph.add("TestSaveTensor", image=image, name="x")
    text = refused(server, graph)
    assert "latent_invalid" in text and "samples" in text


def test_wan21_image_model_without_its_image(server: Server) -> None:
    graph = Graph()
    graph.sample(wanfit_model(graph, WAN21), "x", steps=1)
    assert "clip_vision_output" in refused(server, graph)
