"""Probe, purge and alarm in a graph on a real server."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from comfy_graphs import Graph, core_model, wanfit_model
from comfy_names import HIGH, HIGH_FP8, HIGH_GGUF, LOW, TI2V, VAE, relative_error
from comfy_required import told_and_planned
from comfyui_server import PromptFailed, Server
from PIL import Image

from wanfit.memory.demand import Video

BEYOND_ANY = 2**20
"""GiB that have to be free: more than any machine has, so that the alarm rings at each block, and is urgent."""


def sampled(gib: int, resume: str, *, plain: bool = False, save_every: int = 2) -> tuple[Graph, list[Any]]:
    """Both experts, the second with the alarm's margin; or KSampler on the first with it."""
    graph = Graph()
    high = wanfit_model(graph, HIGH, LOW)
    low = graph.add("TestMargin", model=high if plain else [high[0], 1], gib=gib)
    positive, negative = graph.add("TestConditioning", seed=1), graph.add("TestConditioning", seed=2)
    latent = graph.add("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1)
    common = {
        "positive": positive, "negative": negative, "latent_image": latent, "seed": 3, "steps": 6,
        "sampler_name": "uni_pc", "scheduler": "simple",
    }  # fmt: skip
    if plain:
        node = graph.add("KSampler", model=low, cfg=3.0, denoise=1.0, **common)
    else:
        node = graph.add(
            "WanFitSampler", model_high=high, model_low=low, cfg_high=3.0, cfg_low=3.0, shift=5.0, boundary=0.0,
            switch_step=0, start_at_step=0, end_at_step=10000, add_noise="enable",
            return_with_leftover_noise="disable", save_every=save_every, resume=resume, **common,
        )  # fmt: skip
    graph.add("TestSaveTensor", latent=node, name="alarm")
    return graph, node


def refused(server: Server, graph: Graph) -> tuple[str, dict[str, Any]]:
    with pytest.raises(PromptFailed) as caught:
        server.run(graph.prompt)
    return str(caught.value), caught.value.details


def test_the_alarm_stops_the_sampler_with_its_latents_and_the_same_graph_goes_on(run: Any, server: Server) -> None:
    expected = run(sampled(0, "off")[0])["alarm"]
    text, details = refused(server, sampled(BEYOND_ANY, "off")[0])
    assert details["exception_type"].endswith("NodeError")
    assert (
        "memory_low" in text and "GiB of RAM are free" in text and "queue the same graph again with resume on" in text
    )
    assert "Traceback" not in text and "<" not in text.partition("execution_error")[2]
    graph, node = sampled(0, "on")
    results = run(graph)
    assert "resumed: " in results.entry["outputs"][node[0]]["text"][0]
    # Two blocks a forward: steps that ran while the alarm rang did so in packed 8 bits, before there was no more to give.
    assert relative_error(results["alarm"], expected) < 1e-2


def test_a_plain_sampler_is_told_what_would_have_kept_its_steps(run: Any, server: Server) -> None:
    text, _ = refused(server, sampled(BEYOND_ANY, "off", plain=True)[0])
    assert "memory_low" in text and "kept nothing" in text and "WanFitSampler" in text
    text, _ = refused(server, sampled(BEYOND_ANY, "off", save_every=0)[0])
    assert "memory_low" in text and "kept nothing" in text
    run(sampled(0, "off", plain=True)[0])  # the usual margin again, for the tests that follow


def test_the_probe_shows_what_was_planned_beside_what_was_measured(run: Any, server: Server) -> None:
    graph = Graph()
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0)
    first = graph.add("WanFitMemoryProbe", anything=image, label="before")
    sampler = graph.sample(wanfit_model(graph, HIGH), "probed", seed=11)
    last = graph.add("WanFitMemoryProbe", anything=[sampler, 0], label="sampled")
    decoded = graph.add("WanFitVAEDecode", samples=last, vae=graph.add("VAELoader", vae_name=VAE), tile_size=0)
    last = graph.add("WanFitMemoryProbe", anything=decoded, label="decoded")
    graph.add("TestSaveTensor", image=[last[0], 2], name="chart")
    results = run(graph)
    report = results.entry["outputs"][last[0]]["text"][0]
    rows = {line.split("  ")[0]: line for line in report.splitlines()}
    for stage in ("sampled", "decoded"):
        assert rows[stage].split()[-2:] == ["GiB", "RAM"] and "+" in rows[stage], report
    assert rows.get("before", "-").rstrip().endswith("-")
    assert "not read: " in report and "no CUDA device is used" in report
    (shown,) = results.entry["outputs"][last[0]]["images"]
    picture = server.get(f"/view?filename={shown['filename']}&type={shown['type']}&subfolder={shown['subfolder']}")
    assert Image.open(io.BytesIO(picture)).size[0] > 600, "the node shows it without a script of its own"
    first_report = results.entry["outputs"][first[0]]["text"][0]
    assert "before" in first_report


@pytest.mark.parametrize(
    ("file", "video"),
    [
        (HIGH, Video(832, 480, 81, image=True)),
        (HIGH_FP8, Video(1280, 720, 81, image=True, batch=2)),
        (HIGH_GGUF, Video(832, 480, 33, image=True)),
        (TI2V, Video(1280, 704, 121, image=False, size_multiple=32)),
    ],
    ids=["bf16", "fp8", "gguf", "5b"],
)
def test_the_model_asks_comfyui_for_what_the_plan_says(server: Server, file: str, video: Video) -> None:
    """On this machine, and as on a card: by the plan's terms for it."""
    for card, policy in ((False, "auto"), (True, "stream"), (True, "auto")):
        told, planned = told_and_planned(server, file, policy, card=card, video=video)
        assert told == planned, (card, policy)


@pytest.mark.parametrize("loader", [wanfit_model, core_model])
def test_the_embedding_that_comfyui_holds_gives_its_memory_back(
    server: Server, loader: Callable[[Graph, str], list[Any]]
) -> None:
    graph = Graph()
    graph.sample(graph.add("TestEmbedding", model=loader(graph, HIGH), name="embedding"), "x", steps=2, cfg=1.0)
    server.run(graph.prompt)
    lines = (server.base / "output" / "embedding.txt").read_text().split("\n")[:-1]
    assert len(lines) == 2
    for before, after in (map(int, line.split()) for line in lines):
        assert before > 0
        assert after == (0 if loader is wanfit_model else before)


@pytest.mark.parametrize("release", ["all models", "host cache"])
def test_a_purge_says_each_counter_and_the_graph_goes_on(run: Any, release: str) -> None:
    graph = Graph()
    model = graph.add("WanFitPurge", anything=wanfit_model(graph, HIGH), release=release)
    graph.sample(model, "purged", seed=12)
    results = run(graph)
    said = results.entry["outputs"][model[0]]["text"][0]
    for part in ("before: RAM", "after:  RAM", "counter", "freed", "rss", "heap: "):
        assert part in said, said
    plain = Graph()
    plain.sample(wanfit_model(plain, HIGH), "plain", seed=12)
    assert np.array_equal(results["purged"], run(plain)["plain"])
