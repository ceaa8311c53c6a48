"""The engine-backed MODEL against ComfyUI's own loader: same file, same seed, 4 steps euler/simple, float32."""

from __future__ import annotations

from typing import Any

import pytest
from comfy_graphs import Graph, core_model, wanfit_model
from comfy_names import (
    HIGH,
    HIGH_FP8,
    HIGH_FP8_PLAIN,
    HIGH_GGUF,
    HIGH_QUANT,
    HIGH_QUANT_PLAIN,
    LORA,
    LOW,
    T2V_HIGH,
    TI2V,
    is_old,
    relative_error,
)
from comfyui_server import PromptFailed, Server

PARITY = 1e-4


def compare(run: Any, reference: str, file: str, **sizes: int) -> float:
    results = []
    for name, loader, source in (("core", core_model, reference), ("wanfit", wanfit_model, file)):
        graph = Graph()
        graph.sample(loader(graph, source), name, **sizes)
        results.append(run(graph)[name])
    return relative_error(results[1], results[0])


@pytest.mark.parametrize("file", [HIGH, T2V_HIGH, TI2V])
def test_bf16_equals_core(run: Any, file: str) -> None:
    assert compare(run, file, file, tokens=512) < PARITY


def test_scaled_fp8_equals_core(run: Any, server: Server) -> None:
    """0.3.64 itself casts norms and biases of such files to fp8 (3 % off): there the reference is the same file, dequantised."""
    reference = HIGH_FP8_PLAIN if is_old(server.tree) else HIGH_FP8
    assert compare(run, reference, HIGH_FP8) < PARITY


def test_comfy_quant_equals_core(run: Any, server: Server) -> None:
    """0.3.64 reads such files as garbage, without an error; WanFit does not use its reader."""
    reference = HIGH_QUANT_PLAIN if is_old(server.tree) else HIGH_QUANT
    assert compare(run, reference, HIGH_QUANT) < PARITY


def test_gguf_is_within_its_quantisation_error(run: Any) -> None:
    error = compare(run, HIGH, HIGH_GGUF)
    assert 1e-5 < error < 0.02  # Q8_0 rounds each weight by up to 0.4 % of its block's largest


def test_quantising_while_loading(run: Any) -> None:
    graph = Graph()
    graph.sample(wanfit_model(graph, HIGH, dtype="fp8_e4m3fn"), "fp8")
    reference = Graph()
    reference.sample(core_model(reference, HIGH), "bf16")
    assert 1e-3 < relative_error(run(graph)["fp8"], run(reference)["bf16"]) < 0.1  # 3 bits of mantissa


def test_lora_changes_the_result_as_core_does(run: Any) -> None:
    results = {}
    for name, loader in (("core", core_model), ("wanfit", wanfit_model)):
        graph = Graph()
        model = graph.add("LoraLoaderModelOnly", model=loader(graph, HIGH), lora_name=LORA, strength_model=0.8)
        graph.sample(model, name)
        results[name] = run(graph)[name]
    plain = Graph()
    plain.sample(core_model(plain, HIGH), "plain")
    assert relative_error(results["core"], run(plain)["plain"]) > 0.05
    assert relative_error(results["wanfit"], results["core"]) < 1e-3


def two_stages(loader_is_core: bool) -> Graph:
    graph = Graph()
    if loader_is_core:
        high, low = core_model(graph, HIGH), core_model(graph, LOW)
    else:
        high = wanfit_model(graph, HIGH, LOW)
        low = [high[0], 1]
    high, low = (graph.add("ModelSamplingSD3", model=model, shift=5.0) for model in (high, low))
    positive, negative = graph.add("TestConditioning", seed=1), graph.add("TestConditioning", seed=2)
    latent = graph.add("EmptyHunyuanLatentVideo", width=64, height=48, length=5, batch_size=1)
    common = {
        "positive": positive,
        "negative": negative,
        "steps": 4,
        "cfg": 3.5,
        "sampler_name": "euler",
        "scheduler": "simple",
    }
    latent = graph.add(
        "KSamplerAdvanced", model=high, add_noise="enable", noise_seed=3, latent_image=latent, start_at_step=0,
        end_at_step=2, return_with_leftover_noise="enable", **common,
    )  # fmt: skip
    latent = graph.add(
        "KSamplerAdvanced", model=low, add_noise="disable", noise_seed=0, latent_image=latent, start_at_step=2,
        end_at_step=10000, return_with_leftover_noise="disable", **common,
    )  # fmt: skip
    graph.add("TestSaveTensor", latent=latent, name="stages")
    return graph


def test_two_experts_in_two_samplers(run: Any) -> None:
    expected = run(two_stages(loader_is_core=True))["stages"]
    assert relative_error(run(two_stages(loader_is_core=False))["stages"], expected) < PARITY


@pytest.mark.parametrize("kind", ["skip block 0", "keep input of block 1"])
def test_block_replacements_are_honoured(run: Any, kind: str) -> None:
    results = []
    for name, loader in (("core", core_model), ("wanfit", wanfit_model)):
        graph = Graph()
        graph.sample(graph.add("TestBlockPatch", model=loader(graph, HIGH), kind=kind), name)
        results.append(run(graph)[name])
    assert relative_error(results[1], results[0]) < PARITY


def test_a_patch_inside_blocks_is_refused_by_name(run: Any) -> None:
    graph = Graph()
    graph.sample(graph.add("TestBlockPatch", model=wanfit_model(graph, HIGH), kind="attn1_patch"), "x")
    with pytest.raises(PromptFailed, match="attn1_patch"):
        run(graph)


def test_torch_compile_is_refused_by_name(run: Any) -> None:
    graph = Graph()
    graph.sample(graph.add("TorchCompileModel", model=wanfit_model(graph, HIGH), backend="inductor"), "x", steps=1)
    with pytest.raises(PromptFailed, match=r"patch_unsupported.*torch\.compile"):
        run(graph)


def test_a_lora_that_a_hook_switches_is_refused_by_name(run: Any) -> None:
    graph = Graph()
    hooks = graph.add("CreateHookLoraModelOnly", lora_name=LORA, strength_model=0.5)
    node = graph.sample(wanfit_model(graph, HIGH), "x", steps=1)
    text = graph.prompt[node]["inputs"]["positive"]
    graph.prompt[node]["inputs"]["positive"] = graph.add(
        "ConditioningSetProperties", cond_NEW=text, strength=1.0, set_cond_area="default", hooks=hooks
    )
    with pytest.raises(PromptFailed, match=r"patch_unsupported.*hook.*LoraLoaderModelOnly"):
        run(graph)


def test_saving_and_merging_are_refused(run: Any) -> None:
    graph = Graph()
    graph.add("ModelSave", model=wanfit_model(graph, HIGH), filename_prefix="no")
    with pytest.raises(PromptFailed, match="patch_unsupported"):
        run(graph)
    graph = Graph()
    merged = graph.add("ModelMergeSimple", model1=wanfit_model(graph, HIGH), model2=wanfit_model(graph, LOW), ratio=0.5)
    graph.sample(merged, "x")
    with pytest.raises(PromptFailed, match="patch_unsupported"):
        run(graph)


def test_context_windows(run: Any, server: Server) -> None:
    inputs = {
        "context_length": 9, "context_overlap": 4, "context_schedule": "standard_static", "context_stride": 1,
        "closed_loop": False, "fuse_method": "pyramid", "freenoise": False,
    }  # fmt: skip
    spec = server.get("/object_info")["WanContextWindowsManual"]["input"]
    known = {**spec.get("required", {}), **spec.get("optional", {})}
    given = {key: value for key, value in inputs.items() if key in known}
    missing = {k: v[1]["default"] for k, v in known.items() if k not in given and len(v) > 1 and "default" in v[1]}
    results = []
    for name, loader in (("core", core_model), ("wanfit", wanfit_model)):
        graph = Graph()
        model = loader(graph, T2V_HIGH)
        windows = graph.add("WanContextWindowsManual", model=model, **given, **missing)
        graph.sample(windows, name, length=17)
        if name == "core":
            graph.sample(model, "whole", length=17)
        results.append(run(graph))
    assert relative_error(results[1]["wanfit"], results[0]["core"]) < PARITY
    assert relative_error(results[0]["whole"], results[0]["core"]) > 100 * PARITY, "there is more than one window"
