"""Cancel, memory over many prompts, caching, changed files."""

from __future__ import annotations

import time
from typing import Any

import psutil
import pytest
from comfy_graphs import Graph, wanfit_model, watched
from comfy_names import DEEP, HIGH, LOW, VAE, relative_error
from comfyui_server import PromptFailed, Server

MIB = 2**20


def rss(server: Server) -> int:
    return psutil.Process(server.pid).memory_info().rss


def sampling(name: str = "out", seed: int = 7, steps: int = 4, **latent: int) -> Graph:
    graph = Graph()
    graph.sample(wanfit_model(graph, HIGH, LOW), name, seed=seed, steps=steps, **latent)
    return graph


def test_cancel_in_a_step_ends_within_a_block_and_the_next_prompt_runs(server: Server, run: Any) -> None:
    """The interrupt comes inside of block 3 of 8 of the third forward: no other block is computed, nothing is kept."""
    expected = run(sampling("before"))["before"]
    held = rss(server)
    graph = Graph()
    graph.sample(watched(graph, wanfit_model(graph, DEEP), "watch", "interrupt", forward=2, block=3, times=1), "x")
    entry = server.wait(server.queue(graph.prompt), 30)
    assert any(kind == "execution_interrupted" for kind, _ in entry["status"]["messages"])
    log = (server.base / "output" / "watch.txt").read_text().split("\n")
    assert log.count("end 1.7") == 1 and log.count("start 2.3") == 1  # two whole forwards and three blocks ran
    after = log[log.index("interrupt 2.3") + 1 :]
    assert [line for line in after if line.startswith("end")] in ([], ["end 2.3"])
    again = run(sampling("after", seed=7))["after"]
    assert relative_error(again, expected) == 0
    assert rss(server) - held < 48 * MIB


def test_cancel_from_outside(server: Server) -> None:
    started = server.queue(sampling("x", steps=10000, seed=11, width=160, height=128, length=33).prompt)
    while server.get("/queue")["queue_running"] == [] or "10000" not in server.log[-3000:]:
        time.sleep(0.1)
    began = time.monotonic()
    server.interrupt()
    entry = server.wait(started, 30)
    assert any(kind == "execution_interrupted" for kind, _ in entry["status"]["messages"])
    assert time.monotonic() - began < 5


def test_ten_prompts_leave_memory_flat(server: Server, run: Any) -> None:
    held = []
    for number in range(10):
        run(sampling("flat", seed=100 + number))
        held.append(rss(server))
    assert max(held[2:]) - held[1] < 48 * MIB, [value // MIB for value in held]


def test_only_what_changed_runs_again(server: Server, run: Any) -> None:
    def graph(tile_size: int) -> Graph:
        made = Graph()
        sampler = made.sample(wanfit_model(made, HIGH, LOW), "cached", width=64, height=64, length=5)
        vae = made.add("VAELoader", vae_name=VAE)
        image = made.add("WanFitVAEDecode", samples=[sampler, 0], vae=vae, tile_size=tile_size)
        made.add("TestSaveTensor", image=image, name="decoded")
        return made

    run(graph(0))
    second = graph(128)
    entry = run(second).entry
    ran = {second.prompt[node]["class_type"] for node in server.executed(entry, second.prompt)}
    assert ran == {"WanFitVAEDecode", "TestSaveTensor"}


def test_a_changed_model_file_is_loaded_again(server: Server, run: Any) -> None:
    path = server.base / "models" / "diffusion_models" / "changes.safetensors"
    folder = path.parent
    path.write_bytes((folder / HIGH).read_bytes())
    graph = Graph()
    graph.sample(wanfit_model(graph, "changes.safetensors"), "changes")
    first = run(graph)["changes"]
    replacement = path.with_suffix(".new")
    replacement.write_bytes((folder / LOW).read_bytes())
    replacement.replace(path)
    second = run(graph)["changes"]
    assert relative_error(second, first) > 0.01
    path.unlink()
    server.get("/object_info/WanFitLoader")


def test_no_file_is_chosen(server: Server) -> None:
    """As the loader stands where the folders hold no model."""
    graph = Graph()
    graph.sample(wanfit_model(graph, ""), "x")
    with pytest.raises(PromptFailed) as caught:
        server.run(graph.prompt)
    text = str(caught.value)
    folder = str(server.base / "models" / "diffusion_models")
    assert "model_high is empty: no file is chosen" in text and f"Put it into {folder} or" in text
    assert str(server.base / "output") not in text


def test_a_missing_file_is_named_with_its_source(server: Server) -> None:
    graph = Graph()
    name = "wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors"
    graph.sample(wanfit_model(graph, name), "x")
    with pytest.raises(PromptFailed) as caught:
        server.run(graph.prompt)
    text = str(caught.value)
    assert "model_high" in text and name in text and "huggingface.co" in text and "diffusion_models" in text
