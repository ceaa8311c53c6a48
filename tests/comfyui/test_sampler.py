"""WanFitSampler against two chained KSamplerAdvanced nodes, bit for bit; its split; its checkpoints; bad input."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comfy_graphs import Graph, broken_off, core_model, wanfit_model
from comfy_names import HIGH, LORA, LOW, T2V_HIGH, T2V_LOW, TI2V
from comfyui_server import PACK, PromptFailed, Server, Tree

from wanfit.tiny.layouts import write_plain
from wanfit.tiny.models import tiny_transformer

SWITCH = Path(__file__).parents[1] / "support" / "comfy_switch.py"
SIZE = {"width": 64, "height": 48, "length": 5, "batch_size": 1}
DEFAULTS = {
    "seed": 3, "steps": 4, "cfg_high": 3.5, "cfg_low": 3.0, "sampler_name": "euler", "scheduler": "simple",
    "shift": 5.0, "boundary": 0.0, "switch_step": 0, "start_at_step": 0, "end_at_step": 10000, "add_noise": "enable",
    "return_with_leftover_noise": "disable", "save_every": 0, "resume": "off",
}  # fmt: skip


class Pair:
    """Both experts and what they sample from, in one graph."""

    def __init__(self, high: str = HIGH, low: str | None = LOW, core: bool = False) -> None:
        self.graph = Graph()
        if core:
            self.high, self.low = core_model(self.graph, high), core_model(self.graph, low)
        else:
            self.high = wanfit_model(self.graph, high, low or "none")
            self.low = [self.high[0], 1] if low else None
        self.positive, self.negative = (
            self.graph.add("TestConditioning", seed=1),
            self.graph.add("TestConditioning", seed=2),
        )
        self.latent = self.graph.add("EmptyHunyuanLatentVideo", **SIZE)

    def sampler(self, name: str, **changes: Any) -> list[Any]:
        low = {} if self.low is None else {"model_low": self.low}
        result = self.graph.add(
            "WanFitSampler", model_high=self.high, positive=self.positive, negative=self.negative,
            latent_image=changes.pop("latent", self.latent), **low, **(DEFAULTS | changes),
        )  # fmt: skip
        self.graph.add("TestSaveTensor", latent=result, name=name)
        return result

    def chain(self, name: str, split: int, **changes: Any) -> None:
        given = DEFAULTS | changes
        common = {key: given[key] for key in ("steps", "sampler_name", "scheduler")}
        common |= {"positive": self.positive, "negative": self.negative, "noise_seed": given["seed"]}
        high, low = (
            self.graph.add("ModelSamplingSD3", model=model, shift=given["shift"]) if given["shift"] else model
            for model in (self.high, self.low)
        )
        latent = self.graph.add(
            "KSamplerAdvanced", model=high, add_noise=given["add_noise"], latent_image=self.latent,
            start_at_step=given["start_at_step"], end_at_step=split, return_with_leftover_noise="enable",
            cfg=given["cfg_high"], **common,
        )  # fmt: skip
        latent = self.graph.add(
            "KSamplerAdvanced", model=low, add_noise="disable", latent_image=latent, start_at_step=split,
            end_at_step=given["end_at_step"], return_with_leftover_noise=given["return_with_leftover_noise"],
            cfg=given["cfg_low"], **common,
        )  # fmt: skip
        self.graph.add("TestSaveTensor", latent=latent, name=name)


def info_of(results: Any, node: list[Any]) -> str:
    return results.entry["outputs"][node[0]]["text"][0]


def split_of(info: str) -> int:
    return int(re.search(r"low (\d+) to", info)[1])


def equal_to_chain(run: Any, cases: list[dict[str, Any]], timeout_s: int = 300, **pair: Any) -> list[int]:
    """Run all cases in one prompt, then their chains in another; returns the splits."""
    ours = Pair(**pair)
    nodes = [ours.sampler(f"node{i}", **case) for i, case in enumerate(cases)]
    results = run(ours.graph, timeout_s)
    splits = [split_of(info_of(results, node)) for node in nodes]
    theirs = Pair(**pair)
    for i, (case, split) in enumerate(zip(cases, splits, strict=True)):
        theirs.chain(f"chain{i}", split, **case)
    expected = run(theirs.graph, timeout_s)
    for i, case in enumerate(cases):
        assert np.isfinite(results[f"node{i}"]).all()
        assert np.array_equal(results[f"node{i}"], expected[f"chain{i}"]), (case, splits[i])
    return splits


@pytest.mark.parametrize("steps", [4, 8, 20, 40])
@pytest.mark.parametrize(
    ("sampler_name", "scheduler"),
    [("euler", "simple"), ("uni_pc", "simple"), ("dpmpp_2m", "beta"), ("res_multistep", "simple")],
)
def test_equals_two_chained_samplers_bit_for_bit(run: Any, sampler_name: str, scheduler: str, steps: int) -> None:
    cases = [
        {"steps": steps, "shift": shift, "sampler_name": sampler_name, "scheduler": scheduler} for shift in (5, 8, 12)
    ]
    splits = equal_to_chain(run, cases)
    print(sampler_name, scheduler, steps, "steps: switch at", splits, "for shift 5, 8, 12")
    assert all(0 < split < steps for split in splits) and splits == sorted(splits)


def test_equals_the_chain_with_other_loaders_ranges_and_random_samplers(run: Any) -> None:
    cases = [
        {"start_at_step": 1, "add_noise": "enable", "end_at_step": 3, "return_with_leftover_noise": "enable"},
        {"sampler_name": "euler_ancestral", "steps": 6},
        {"sampler_name": "heun", "shift": 0.0},
        {"boundary": 0.7, "cfg_high": 1.0, "cfg_low": 1.0},
        {"switch_step": 1},
    ]
    equal_to_chain(run, cases)
    equal_to_chain(run, cases, core=True)
    equal_to_chain(run, cases[:2], high=T2V_HIGH, low=T2V_LOW)


@pytest.mark.parametrize(
    ("steps", "shift", "boundary", "split"), [(20, 5, 0.9, 8), (20, 5, 0.875, 9), (20, 8, 0.0, 10), (4, 5, 0.0, 2)]
)
def test_the_split_is_that_of_the_noise_levels(run: Any, steps: int, shift: float, boundary: float, split: int) -> None:
    """The numbers come from the formula shift * s / (1 + (shift - 1) * s) over s = 1, 1 - 1/steps ..."""
    points = [1 - i / steps for i in range(steps)]
    levels = [shift * s / (1 + (shift - 1) * s) for s in points]
    assert sum(level >= (boundary or 0.9) for level in levels) == split
    pair = Pair()
    node = pair.sampler("split", steps=steps, shift=shift, boundary=boundary)
    info = info_of(run(pair.graph), node)
    assert f"{steps} steps: high 0 to {split}, low {split} to {steps}" in info


def test_what_disagrees_is_pointed_out(run: Any) -> None:
    pair = Pair()
    manual = pair.sampler("a", steps=4, switch_step=3)
    lonely = pair.sampler("b", steps=4, boundary=0.001)
    results = run(pair.graph)
    assert "note: the switch at step 3 was given; the boundary 0.9 is passed at step 2" in info_of(results, manual)
    assert "note: one expert takes every step" in info_of(results, lonely)


def test_one_model_runs_alone_as_in_ksampler(run: Any) -> None:
    pair = Pair(TI2V, None)
    node = pair.sampler(
        "alone",
        shift=5.0,
        latent=pair.graph.add("TestLatent", batch=1, channels=48, frames=2, height=4, width=6, seed=5),
    )
    graph = Graph()
    graph.sample(graph.add("ModelSamplingSD3", model=wanfit_model(graph, TI2V), shift=5.0), "x", seed=3)
    sampled = graph.prompt[str(len(graph.prompt) - 1)]
    sampled["inputs"]["latent_image"] = graph.add(
        "TestLatent", batch=1, channels=48, frames=2, height=4, width=6, seed=5
    )
    results = run(pair.graph)
    assert "one model" in info_of(results, node)
    assert np.array_equal(results["alone"], run(graph)["x"])


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"steps": 1}, ["steps is 1", "2 or more"]),
        ({"start_at_step": 4}, ["start_at_step 4", "nothing would run"]),
        ({"start_at_step": 2, "end_at_step": 2}, ["end_at_step 2"]),
        ({"boundary": 1.5}, ["boundary"]),
        ({"steps": 0}, ["steps"]),
        ({"boundary": float("nan")}, ["boundary is nan"]),
        ({"shift": float("nan")}, ["shift is nan"]),
    ],
)
def test_numbers_that_cannot_work(server: Server, changes: dict[str, Any], parts: list[str]) -> None:
    pair = Pair()
    pair.sampler("x", **changes)
    text = refused(server, pair.graph)
    for part in parts:
        assert part in text, text


def test_models_that_cannot_work(server: Server) -> None:
    pair = Pair()
    pair.high, pair.low = pair.low, pair.high
    pair.sampler("x")
    assert "pair_mismatch" in (text := refused(server, pair.graph)) and "model_high" in text
    pair = Pair(HIGH, None)
    pair.sampler("x")
    assert "part_missing" in (text := refused(server, pair.graph)) and "model_low" in text
    pair = Pair()
    pair.high = pair.graph.add("ModelSamplingSD3", model=pair.high, shift=12.0)
    pair.sampler("x", shift=0.0)
    assert "different noise schedules" in refused(server, pair.graph)


def refused(server: Server, graph: Graph) -> str:
    with pytest.raises(PromptFailed) as caught:
        server.run(graph.prompt)
    return f"{caught.value} {caught.value.details}"


@pytest.mark.parametrize("sampler_name", ["euler", "uni_pc", "dpmpp_2m", "euler_ancestral"])
@pytest.mark.parametrize("after", [3, 14])
def test_a_run_that_was_broken_off_goes_on_to_the_same_result(
    server: Server, run: Any, sampler_name: str, after: int
) -> None:
    def made(name: str, **changes: Any) -> tuple[Graph, list[Any]]:
        pair = Pair()
        node = pair.sampler(name, sampler_name=sampler_name, steps=24, **changes)
        return pair.graph, node

    expected = run(made("whole")[0])["whole"]
    broken_off(server, made("broken", save_every=1)[0], after)
    graph, node = made("resumed", save_every=1, resume="on")
    results = run(graph)
    said = re.search(r"resumed: (\d+) model outputs", info_of(results, node))
    assert int(said[1]) >= after
    assert np.array_equal(results["resumed"], expected)
    assert not list((server.base / "output" / "wanfit_checkpoints").glob("*/*"))


def test_checkpoints_of_another_run_are_refused_with_the_difference(server: Server, run: Any) -> None:
    pair = Pair()
    pair.sampler("a", steps=24, save_every=2)
    broken_off(server, pair.graph, 2)
    for changes, part in (
        ({"cfg_low": 4.0}, "cfg_low was 3.0 and is 4.0"),
        ({"seed": 4}, "seed was 3 and is 4"),
        ({"steps": 25}, "steps was 24 and is 25"),
    ):
        pair = Pair()
        pair.sampler("a", **({"steps": 24, "resume": "on"} | changes))
        text = refused(server, pair.graph)
        assert "resume_mismatch" in text and part in text
    pair = Pair()
    pair.graph.prompt[pair.positive[0]]["inputs"]["seed"] = 9  # the sampler keeps its node id
    pair.sampler("a", steps=24, resume="on")
    assert "resume_mismatch" in (text := refused(server, pair.graph)) and "positive was" in text


def test_nothing_to_resume_is_a_run_from_the_beginning(server: Server, run: Any) -> None:
    shutil.rmtree(server.base / "output" / "wanfit_checkpoints", ignore_errors=True)
    pair = Pair()
    node = pair.sampler("fresh", resume="on", seed=77)
    plain = pair.sampler("plain", seed=77)
    results = run(pair.graph)
    assert "nothing to resume" in info_of(results, node)
    assert "resume" not in info_of(results, plain)
    assert np.array_equal(results["fresh"], results["plain"])


def test_a_lora_that_changed_and_damaged_checkpoints_are_refused(server: Server, run: Any) -> None:
    def made(strength: float, **changes: Any) -> Graph:
        pair = Pair()
        lora = pair.graph.add("LoraLoaderModelOnly", model=pair.high, lora_name=LORA, strength_model=strength)
        pair.high = lora
        pair.sampler("lora", steps=24, **changes)
        return pair.graph

    expected = run(made(0.8))["lora"]
    broken_off(server, made(0.8, save_every=2), 2)
    text = refused(server, made(0.9, resume="on"))
    assert "resume_mismatch" in text and "model_high was" in text
    assert np.array_equal(run(made(0.8, resume="on", save_every=2))["lora"], expected)

    broken_off(server, made(0.8, save_every=2), 2)
    first = next((server.base / "output" / "wanfit_checkpoints").glob("*/00000.safetensors"))
    whole = first.read_bytes()
    for content in (whole[:1000], b"", b"x" * 2000):
        first.write_bytes(content)
        assert "file_damaged" in refused(server, made(0.8, resume="on"))
    first.unlink()
    assert "does not follow" in refused(server, made(0.8, resume="on"))


def test_a_killed_server_loses_no_more_than_the_interval(server: Server, run: Any) -> None:
    """What a kill leaves: whole files, and perhaps an unfinished one, which is not read."""
    pair = Pair()
    pair.sampler("whole", steps=24)
    expected = run(pair.graph)["whole"]
    pair = Pair()
    pair.sampler("killed", steps=24, save_every=4)
    broken_off(server, pair.graph, 2)
    files = sorted((server.base / "output" / "wanfit_checkpoints").glob("*/*.safetensors"))
    files[-1].rename(files[-1].with_suffix(".part"))
    pair = Pair()
    node = pair.sampler("again", steps=24, save_every=4, resume="on")
    results = run(pair.graph)
    assert int(re.search(r"resumed: (\d+)", info_of(results, node))[1]) >= 4
    assert np.array_equal(results["again"], expected)


def test_the_first_expert_is_gone_before_the_second_is_touched(tree: Tree, tmp_path: Path) -> None:
    """Its blocks, its LoRAs, and what ComfyUI loaded of it; seen from inside, with the engine's store on the CPU."""
    for name, seed in (("high", 1), ("low", 2)):
        write_plain(tmp_path / f"{name}.safetensors", tiny_transformer("t2v-a14b", seed=seed), dtype=torch.bfloat16)
    ran = subprocess.run(
        [tree.python, SWITCH, PACK, tmp_path], cwd=tree.root, capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    told = json.loads(ran.stdout.strip().splitlines()[-1])
    first, second = told["seen"]
    assert (first["expert"], second["expert"]) == (0, 1)
    assert first["loaded"] == ["high"]
    assert second == {"expert": 1, "blocks": 0, "loras": [0], "loaded": ["low"]}
    assert told["entered"] == sorted(told["entered"]) and set(told["entered"]) == {0, 1}
    assert told["released"] == [0, 1]
    kept = told["kept"]
    assert kept["before"][0] > 0  # in RAM; the device's was given back when the sampler was done
    assert not kept["alive"] and kept["after"] == [0, 0], "a MODEL that nothing refers to holds no memory"
