"""The nodes beside the loader, and bad input, in the words of the graph."""

from __future__ import annotations

from typing import Any

import pytest
from comfy_graphs import Graph, core_model, wanfit_model
from comfy_names import (
    HIGH,
    HIGH_GGUF,
    LORA,
    LORA_TOO_LARGE,
    LOW,
    LOW_GGUF,
    T2V_HIGH,
    TEXT,
    TI2V,
    VAE,
    WAN21,
    relative_error,
)
from comfyui_server import PromptFailed, Server


def latent(graph: Graph, **changes: int) -> list[Any]:
    sizes = {"batch": 1, "channels": 16, "frames": 2, "height": 6, "width": 20, "seed": 5}
    return graph.add("TestLatent", **{**sizes, **changes})


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


def test_a_moved_text_encoder_takes_no_copy_in_ram(server: Server, run: Any) -> None:
    graph = Graph()
    moved = graph.add("TestMoveText", clip=graph.add("WanFitTextEncoderLoader", text_encoder=TEXT, device="default"))
    said = run(graph).entry["outputs"][moved[0]]["text"][0]
    assert said.startswith("0 of ") and int(said.split()[-1]) > 24 * 7  # seven matrices a layer, and the embedding


def test_a_core_text_node_that_runs_out_of_memory_says_the_cause(server: Server, run: Any) -> None:
    """CLIPTextEncode is the core's; the failure is an allocation that no machine grants, through a copy of the CLIP."""
    for place in ("load", "forward", ""):
        graph = Graph()
        clip = graph.add("WanFitTextEncoderLoader", text_encoder=TEXT, device="default")
        used = graph.add("TestTextFails", clip=clip, place=place, nbytes=str(2**60)) if place else clip
        graph.add("TestSaveTensor", name="text", conditioning=graph.add("CLIPTextEncode", clip=used, text="a"))
        if not place:
            assert run(graph)["text"].shape[-1] == 4096
            continue
        with pytest.raises(PromptFailed) as caught:
            run(graph)
        said = str(caught.value)
        assert "RAM is full in the stage text: 1073741824.00 GiB more were needed" in said and "it is not VRAM" in said
        assert "DefaultCPUAllocator" not in said


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
    stages = [line.split("  ")[0] for line in report.splitlines()[2:]]
    assert stages[:3] == ["stage", "made", "purged"] and "GiB" in report
    assert all(line.startswith("not read: ") for line in stages[3:])  # counters that need a CUDA device
    assert outputs[second[0]]["images"]
    assert outputs[purged[0]]["text"][0].count("RAM ") >= 2  # before and after


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


@pytest.mark.parametrize("through", ["", "LoraLoaderModelOnly", "WanFitOffloadPolicy"])
def test_a_missing_low_expert_is_an_error_of_the_node_that_uses_it(server: Server, through: str) -> None:
    graph = Graph()
    model = wanfit_model(graph, HIGH)
    low = [model[0], 1]
    policy = {"policy": "auto", "vram_budget": 0.0, "ram_budget": 0.0, "attention": "comfyui"}
    if through == "LoraLoaderModelOnly":
        low = graph.add(through, model=low, lora_name=LORA, strength_model=1.0)
    elif through == "WanFitOffloadPolicy":
        low = [graph.add(through, model=model, **policy)[0], 1]
    graph.sample(low, "x")
    with pytest.raises(PromptFailed) as caught:
        server.run(graph.prompt)
    assert caught.value.details["node_type"] == (through if through.startswith("Lora") else "KSampler")
    assert "part_missing" in str(caught.value) and "model_low" in str(caught.value)
    assert (through or "WanFitLoader") in str(caught.value) or through.startswith("Lora")


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


def test_wan21_image_model_without_its_image(server: Server) -> None:
    graph = Graph()
    graph.sample(wanfit_model(graph, WAN21), "x", steps=1)
    assert "clip_vision_output" in refused(server, graph)


@pytest.mark.parametrize("file", [T2V_HIGH, TI2V])
def test_an_image_on_a_model_that_takes_none(server: Server, file: str) -> None:
    """ComfyUI's own model ignores it without a word."""
    graph = Graph()
    text = graph.add("TestConditioning", seed=1)
    made = graph.add(
        "WanImageToVideo", positive=text, negative=text, vae=graph.add("VAELoader", vae_name=VAE), width=32, height=32,
        length=1, batch_size=1, start_image=graph.add("EmptyImage", width=32, height=32, batch_size=1, color=0),
    )  # fmt: skip
    channels = 48 if file == TI2V else 16
    graph.add(
        "TestSaveTensor", name="x",
        latent=graph.add(
            "KSampler", model=wanfit_model(graph, file), positive=made, negative=[made[0], 1], seed=1, steps=1, cfg=1.0,
            sampler_name="euler", scheduler="simple", denoise=1.0,
            latent_image=latent(graph, channels=channels, frames=1, height=4, width=4),
        ),
    )  # fmt: skip
    text = refused(server, graph)
    assert "image_unexpected" in text and "positive" in text


@pytest.mark.parametrize("size", [{"channels": 48}, {"frames": 0}], ids=["channels", "no frames"])
def test_a_latent_that_the_model_cannot_take(server: Server, size: dict[str, int]) -> None:
    graph = Graph()
    text = graph.add("TestConditioning", seed=1)
    result = graph.add(
        "KSampler", model=wanfit_model(graph, HIGH), positive=text, negative=text, seed=1, steps=1, cfg=1.0,
        sampler_name="euler", scheduler="simple", denoise=1.0, latent_image=latent(graph, **size),
    )  # fmt: skip
    graph.add("TestSaveTensor", latent=result, name="x")
    refusal = refused(server, graph)
    assert "latent_invalid" in refusal and "latent_image" in refusal


def test_a_file_of_another_kind_as_the_model(server: Server) -> None:
    """A VAE among the diffusion models."""
    folder = server.base / "models"
    (folder / "diffusion_models" / VAE).write_bytes((folder / "vae" / VAE).read_bytes())
    graph = Graph()
    graph.sample(wanfit_model(graph, VAE), "x")
    text = refused(server, graph)
    (folder / "diffusion_models" / VAE).unlink()
    assert "pair_mismatch" in text and "model_high is a Wan 2.1 VAE" in text
    (folder / "text_encoders" / VAE).write_bytes((folder / "vae" / VAE).read_bytes())
    graph = Graph()
    graph.add("PreviewAny", source=graph.add("WanFitTextEncoderLoader", text_encoder=VAE, device="default"))
    text = refused(server, graph)
    (folder / "text_encoders" / VAE).unlink()
    assert "pair_mismatch" in text and "text_encoder is a Wan 2.1 VAE" in text


@pytest.mark.parametrize(
    "changes", [{"vram_budget": float("nan")}, {"ram_budget": float("nan")}, {"policy": "fastest"}], ids=str
)
def test_numbers_and_choices_that_are_none(server: Server, changes: dict[str, Any]) -> None:
    """NaN passes ComfyUI's check of the range; an unknown choice passes that of 0.3.64."""
    graph = Graph()
    policy = {"policy": "auto", "vram_budget": 0.0, "ram_budget": 0.0, "attention": "auto"}
    graph.sample(graph.add("WanFitOffloadPolicy", model=wanfit_model(graph, HIGH), **(policy | changes)), "x")
    text = refused(server, graph)
    assert next(iter(changes)) in text and ("number_invalid" in text or "not in" in text)


def test_a_budget_below_the_floor_says_the_floor(server: Server) -> None:
    graph = Graph()
    placed = graph.add(
        "WanFitOffloadPolicy", model=wanfit_model(graph, HIGH), policy="auto", vram_budget=0.001, ram_budget=0.0,
        attention="comfyui",
    )  # fmt: skip
    graph.sample(placed, "x")
    text = refused(server, graph)
    assert "number_invalid" in text and "vram_budget" in text and "smallest" in text


def test_attention_that_the_device_has_not_is_refused(server: Server) -> None:
    graph = Graph()
    placed = graph.add(
        "WanFitOffloadPolicy", model=wanfit_model(graph, HIGH), policy="auto", vram_budget=0.0, ram_budget=0.0,
        attention="flash", fp8_matmul=False,
    )  # fmt: skip
    graph.sample(placed, "x")
    text = refused(server, graph)
    assert "attention_unavailable" in text and "flash needs a CUDA device" in text


def test_nan_stops_the_run_with_its_likely_cause(server: Server) -> None:
    graph = Graph()
    model = wanfit_model(graph, HIGH)
    model = graph.add("LoraLoaderModelOnly", model=model, lora_name=LORA_TOO_LARGE, strength_model=1.0)
    graph.sample(model, "x", steps=1)
    text = refused(server, graph)
    assert "nan_in_latents" in text and "Most likely a LoRA" in text


def test_two_videos_in_one_batch(run: Any) -> None:
    results = []
    for name, loader in (("core", core_model), ("wanfit", wanfit_model)):
        graph = Graph()
        graph.sample(loader(graph, HIGH), name, batch_size=2, steps=2)
        results.append(run(graph)[name])
    assert results[0].shape[0] == 2
    assert relative_error(results[1], results[0]) < 1e-4
