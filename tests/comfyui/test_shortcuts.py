"""What users do with core's nodes: EasyCache, LazyCache, guidance or a LoRA's strength by step; previews."""

from __future__ import annotations

import json
import re
import struct
from typing import Any

import numpy as np
import pytest
import websocket
from comfy_graphs import Graph, broken_off, core_model, wanfit_model
from comfy_names import HIGH, LORA, LOW, relative_error
from comfyui_server import PromptFailed, Server

PARITY = 1e-4
STEPS = 12
CACHES = {
    "EasyCache": {"reuse_threshold": 2.0, "start_percent": 0.0, "end_percent": 0.95, "verbose": False},
    "LazyCache": {"reuse_threshold": 2.0, "start_percent": 0.0, "end_percent": 0.95, "verbose": False},
}
WHOLE = {
    "seed": 3, "steps": STEPS, "cfg_high": 3.5, "cfg_low": 3.5, "sampler_name": "euler", "scheduler": "simple",
    "shift": 5.0, "boundary": 0.0, "switch_step": 0, "start_at_step": 0, "end_at_step": 10000, "add_noise": "enable",
    "return_with_leftover_noise": "disable", "save_every": 0, "resume": "off",
}  # fmt: skip


class Video:
    """Both experts of a loader, through a node for each if one is named, and what they sample from."""

    def __init__(self, core: bool = False, cache: str | None = None, **settings: Any) -> None:
        self.graph = Graph()
        if core:
            models = [core_model(self.graph, name) for name in (HIGH, LOW)]
        else:
            high = wanfit_model(self.graph, HIGH, LOW)
            models = [high, [high[0], 1]]
        if cache is not None:
            models = [self.graph.add(cache, model=model, **(CACHES[cache] | settings)) for model in models]
        self.models = models
        self.text = [self.graph.add("TestConditioning", seed=seed) for seed in (1, 2)]
        self.latent = self.graph.add("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1)

    def ours(self, name: str, latent: Any = None, **changes: Any) -> list[Any]:
        result = self.graph.add(
            "WanFitSampler", model_high=self.models[0], model_low=self.models[1], positive=self.text[0],
            negative=self.text[1], latent_image=latent or self.latent, **(WHOLE | changes),
        )  # fmt: skip
        self.graph.add("TestSaveTensor", latent=result, name=name)
        return result

    def chain(self, name: str, *stages: tuple[int, int, int, float]) -> None:
        """KSamplerAdvanced nodes: (expert, first step, last step, cfg) each."""
        latent = self.latent
        shifted = [self.graph.add("ModelSamplingSD3", model=model, shift=5.0) for model in self.models]
        for number, (expert, first, last, cfg) in enumerate(stages):
            latent = self.graph.add(
                "KSamplerAdvanced", model=shifted[expert], add_noise="disable" if number else "enable", noise_seed=3,
                steps=STEPS, cfg=cfg, sampler_name="euler", scheduler="simple", positive=self.text[0],
                negative=self.text[1], latent_image=latent, start_at_step=first, end_at_step=last,
                return_with_leftover_noise="enable" if number + 1 < len(stages) else "disable",
            )  # fmt: skip
        self.graph.add("TestSaveTensor", latent=latent, name=name)


def test_a_loras_strength_by_step_through_clones(run: Any) -> None:
    """1, then 0.4, then none, then 1 again, of the same MODEL: as with core's model."""
    results = {}
    for name, core in (("core", True), ("wanfit", False)):
        video = Video(core)
        strong, weak = (
            video.graph.add("LoraLoaderModelOnly", model=video.models[0], lora_name=LORA, strength_model=strength)
            for strength in (1.0, 0.4)
        )
        video.models = [strong, weak, video.models[0]]
        video.chain(name, (0, 0, 3, 1.0), (1, 3, 6, 1.0), (2, 6, 9, 1.0), (0, 9, 10000, 1.0))
        video.chain("strong", (0, 0, 10000, 1.0))
        results[name] = run(video.graph)
    expected = results["core"]["core"]
    error = relative_error(results["wanfit"]["wanfit"], expected)
    print(f"strengths by clone: relative error {error:.1e}")
    assert relative_error(results["core"]["strong"], expected) > 0.01
    assert error < 1e-3


def test_previews_and_progress_of_both_experts(server: Server) -> None:
    """The core's callbacks run in each step of each expert."""
    video = Video()
    node = video.ours("previews", seed=12)
    client = "wanfit-sampler-previews"
    socket = websocket.create_connection(f"{server.address.replace('http', 'ws')}/ws?clientId={client}", timeout=60)
    pictures, progress = 0, []
    prompt_id = server.queue(video.graph.prompt, client)
    while True:
        message = socket.recv()
        if isinstance(message, bytes):
            kind, _ = struct.unpack(">II", message[:8])
            pictures += kind == 1  # PREVIEW_IMAGE
            continue
        told = json.loads(message)
        if told["type"] == "progress" and told["data"]["node"] == node[0]:
            progress.append((told["data"]["value"], told["data"]["max"]))
        if told["type"] in ("execution_success", "execution_error", "execution_interrupted"):
            break
    socket.close()
    entry = server.wait(prompt_id)
    assert entry["status"]["status_str"] == "success"
    split = int(re.search(r"low (\d+) to", entry["outputs"][node[0]]["text"][0])[1])
    ends = {last for value, last in progress if value == last}
    assert ends == {split, STEPS - split}, "both experts reach the end of their steps"
    assert pictures >= 2


def split_of(results: Any, node: list[Any]) -> int:
    return int(re.search(r"low (\d+) to", results.entry["outputs"][node[0]]["text"][0])[1])


@pytest.mark.parametrize("cache", CACHES)
def test_a_step_cache_works_as_on_cores_model(run: Any, cache: str) -> None:
    video = Video(cache=cache)
    node = video.ours("cached")
    results = run(video.graph)
    split = split_of(results, node)
    stages = ((0, 0, split, 3.5), (1, split, 10000, 3.5))
    chained, core, plain = Video(cache=cache), Video(core=True, cache=cache), Video()
    chained.chain("chained", *stages)
    core.chain("core", *stages)
    plain.chain("plain", *stages)
    assert np.array_equal(results["cached"], run(chained.graph)["chained"])
    reference = run(core.graph)["core"]
    error, skipped = relative_error(results["cached"], reference), relative_error(run(plain.graph)["plain"], reference)
    print(f"{cache}: against core's model {error:.1e}; effect of the cache {skipped:.1e}")
    assert skipped > 100 * PARITY, "no step was left out"
    assert error < PARITY


def test_guidance_in_the_first_steps_only(run: Any) -> None:
    """By the experts' own cfg, and by two samplers that split before the experts do."""
    video = Video()
    node = video.ours("experts", cfg_low=1.0)
    first = video.ours("first", end_at_step=2, return_with_leftover_noise="enable")
    video.ours("steps", latent=first, start_at_step=2, add_noise="disable", cfg_high=1.0, cfg_low=1.0)
    results = run(video.graph)
    split = split_of(results, node)
    assert split > 2
    for core in (False, True):
        chains = Video(core)
        chains.chain("experts", (0, 0, split, 3.5), (1, split, 10000, 1.0))
        chains.chain("steps", (0, 0, 2, 3.5), (0, 2, split, 1.0), (1, split, 10000, 1.0))
        expected = run(chains.graph)
        for name in ("experts", "steps"):
            actual, reference = results[name], expected[name]
            print(name, f"core's model: {core}, relative error {relative_error(actual, reference):.1e}")
            assert relative_error(actual, reference) < PARITY if core else np.array_equal(actual, reference)
    assert relative_error(results["experts"], results["steps"]) > 100 * PARITY


def test_another_cache_is_another_run_and_easy_cache_is_pointed_out(server: Server, run: Any) -> None:
    def made(cache: str | None, name: str = "cache", **changes: Any) -> tuple[Graph, list[Any]]:
        settings = {"reuse_threshold": changes.pop("reuse_threshold", 2.0)} if cache else {}
        video = Video(cache=cache, **settings)
        node = video.ours(name, steps=24, **changes)
        return video.graph, node

    whole = run(made("LazyCache")[0])["cache"]
    broken_off(server, made("LazyCache", save_every=1)[0], 3)
    with pytest.raises(PromptFailed) as caught:
        server.run(made("LazyCache", resume="on", reuse_threshold=1.0)[0].prompt)
    assert "resume_mismatch" in str(caught.value.details) + str(caught.value)
    graph, node = made("LazyCache", resume="on")
    results = run(graph)
    assert "resumed" in results.entry["outputs"][node[0]]["text"][0]
    assert np.array_equal(results["cache"], whole)

    broken_off(server, made("EasyCache", save_every=1)[0], 3)
    graph, node = made("EasyCache", resume="on")
    assert "begins anew here" in run(graph).entry["outputs"][node[0]]["text"][0]
