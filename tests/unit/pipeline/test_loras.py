"""LoRAs in the host, against the same LoRAs merged into the weights of a model file."""

import gc
import weakref

import pytest
import torch
from tiny_run import latents_of, placement_on_cpu, relative_error, settings_for

from wanfit.blocks import ForwardSettings
from wanfit.checkpoint import open_checkpoint
from wanfit.errors import InputError
from wanfit.offload import Ladder, MappedBlocks
from wanfit.pipeline.files import ModelFiles
from wanfit.pipeline.loras import LoraChoice, load_loras
from wanfit.pipeline.transformer import build_transformer
from wanfit.quant import dequantize
from wanfit.tiny.gguf_layout import write_gguf
from wanfit.tiny.layouts import write_comfy_scaled, write_plain
from wanfit.tiny.lora import DIALECTS, KINDS, lora_tensors, write_lora
from wanfit.tiny.models import tiny_transformer, tiny_vae

EXACT, QUANTISED = 1e-4, 1e-3
"""Required bounds. Measured: see the printed figures (pytest -s)."""

LAYOUTS = {
    "float32": lambda path, weights: write_plain(path, weights, dtype=torch.float32),
    "scaled fp8": write_comfy_scaled,
    "Q8_0": lambda path, weights: write_gguf(path.with_suffix(".gguf"), weights, "Q8_0"),
    "Q4_K_M": lambda path, weights: write_gguf(path.with_suffix(".gguf"), weights, "Q4_K_M"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("loras")
    write_plain(root / "vae.safetensors", tiny_vae(base_dim=8), dtype=torch.float32)
    for seed, name in ((1, "high"), (2, "low")):
        weights = tiny_transformer("t2v-a14b", seed=seed)
        for layout, write in LAYOUTS.items():
            (root / layout).mkdir(exist_ok=True)
            write(root / layout / f"wan2.2_t2v_{name}_noise.safetensors", weights)
    return root


def pair(root, layout) -> ModelFiles:
    high, low = (next((root / layout).glob(f"*_{name}_*")) for name in ("high", "low"))
    return ModelFiles(high, low, root / "none", root / "vae.safetensors")


def dequantized(path) -> dict[str, torch.Tensor]:
    with open_checkpoint(path) as checkpoint:
        return {name: dequantize(checkpoint.load(name), torch.float32).clone() for name in checkpoint.tensors}


def merge(weights, tensors, strength) -> None:
    """The definition, for the plainest dialect: W += strength * alpha / rank * up @ down; W += strength * diff."""
    for name in weights:
        stem = "diffusion_model." + name.removesuffix(".weight").removesuffix(".bias")
        if name.endswith(".weight") and f"{stem}.lora_up.weight" in tensors:
            up, down = (tensors[f"{stem}.lora_{part}.weight"].double().flatten(1) for part in ("up", "down"))
            scale = float(tensors[f"{stem}.alpha"]) / len(down) if f"{stem}.alpha" in tensors else 1.0
            change = scale * (up @ down).view(weights[name].shape)
        elif name.endswith("modulation"):
            change = tensors.get(f"{stem.removesuffix('.modulation')}.diff_m", torch.zeros(()))
        else:
            change = tensors.get(f"{stem}.diff_b" if name.endswith(".bias") else f"{stem}.diff", torch.zeros(()))
        weights[name] = (weights[name].double() + strength * change.double()).float()


@pytest.fixture(scope="module")
def plain_run(folder, tmp_path_factory):
    settings = settings_for(pair(folder, "float32"), tmp_path_factory.mktemp("x") / "a.mp4")
    return {
        layout: latents_of(pair(folder, layout), settings, placement_on_cpu(chunk_tokens=13))
        for layout in ("float32", "scaled fp8", "Q8_0", "Q4_K_M")
    }


def compare(folder, plain_run, tmp_path, layout, given, bound):
    """`given`: (tensors, strength, experts) of each LoRA."""
    files = pair(folder, layout)
    settings = settings_for(files, tmp_path / "a.mp4")
    loras, merged = [], {"high": dequantized(files.high), "low": dequantized(files.low)}
    for number, (tensors, strength, expert) in enumerate(given):
        path = write_lora(tmp_path / f"{number}.safetensors", tensors)
        loras.append(LoraChoice(path, strength, expert))
        for name in ("high", "low") if expert == "both" else (expert,):
            merge(merged[name], tensors, strength)
    paths = [
        write_plain(tmp_path / f"wan2.2_t2v_{name}_noise.safetensors", weights, dtype=torch.float32)
        for name, weights in merged.items()
    ]
    reference = latents_of(ModelFiles(*paths, files.text_encoder, files.vae), settings, placement_on_cpu())
    actual = latents_of(files, settings, placement_on_cpu(chunk_tokens=13), loras=loras)
    error = relative_error(actual, reference)
    print(f"{layout}: relative error {error:.1e}, effect {relative_error(plain_run[layout], reference):.2f}")
    assert relative_error(plain_run[layout], reference) > 0.01, "the LoRA does something"
    assert error <= bound


KIND_SETS = [("low rank",), ("diff",), ("diff_b",), ("diff_m",), KINDS]


@pytest.mark.parametrize("kinds", KIND_SETS, ids=["+".join(kinds) for kinds in KIND_SETS])
def test_every_kind_equals_its_merge(folder, plain_run, tmp_path, kinds):
    tensors = lora_tensors(tiny_transformer("t2v-a14b", seed=1), kinds=kinds)
    compare(folder, plain_run, tmp_path, "float32", [(tensors, 0.8, "both")], EXACT)


@pytest.mark.parametrize("layout", ["scaled fp8", "Q8_0", "Q4_K_M"])
def test_on_quantised_weights_equals_the_merge_into_the_dequantised_ones(folder, plain_run, tmp_path, layout):
    tensors = lora_tensors(tiny_transformer("t2v-a14b", seed=1), kinds=KINDS, alpha=None)
    compare(folder, plain_run, tmp_path, layout, [(tensors, 1.2, "both")], QUANTISED)


def test_several_loras_add_up_each_on_its_expert(folder, plain_run, tmp_path):
    weights = tiny_transformer("t2v-a14b", seed=1)
    given = [
        (lora_tensors(weights, kinds=KINDS, seed=1), 1.5, "high"),
        (lora_tensors(weights, rank=7, seed=2, dtype=torch.bfloat16), -0.5, "both"),
        (lora_tensors(weights, kinds=("low rank", "diff_b"), seed=3), 0.7, "low"),
    ]
    compare(folder, plain_run, tmp_path, "float32", given, EXACT)


def test_strength_zero_is_not_applied(folder, plain_run, tmp_path):
    path = write_lora(tmp_path / "a.safetensors", lora_tensors(tiny_transformer("t2v-a14b")))
    choice = LoraChoice(path, 0.0)
    files = pair(folder, "float32")
    loras = load_loras([choice], files.transformers)
    assert not loras.applied and loras.notices == ["a.safetensors: strength 0, not applied"]
    settings = settings_for(files, tmp_path / "a.mp4")
    same = latents_of(files, settings, placement_on_cpu(chunk_tokens=13), loras=[choice])
    assert torch.equal(same, plain_run["float32"])


def test_every_dialect_gives_the_same_latents(folder, tmp_path):
    files = pair(folder, "float32")
    settings = settings_for(files, tmp_path / "a.mp4", steps=2)
    results = []
    for dialect in DIALECTS:
        path = write_lora(tmp_path / "a.safetensors", lora_tensors(tiny_transformer("t2v-a14b"), dialect=dialect))
        results.append(latents_of(files, settings, placement_on_cpu(), loras=[LoraChoice(path)]))
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("keep", [True, False])
def test_a_transformer_holds_patches_only_between_load_and_release(folder, tmp_path, keep):
    path = write_lora(tmp_path / "a.safetensors", lora_tensors(tiny_transformer("t2v-a14b"), dtype=torch.bfloat16))
    files = pair(folder, "float32")
    (patches, _) = load_loras([LoraChoice(path)], files.transformers).patches
    with open_checkpoint(files.high) as checkpoint:
        source = MappedBlocks(checkpoint, torch.device("cpu"))
        transformer = build_transformer(checkpoint, source, Ladder(ForwardSettings(64)), torch.float32)
        transformer.patches, transformer.keep_patches = patches, keep
        transformer.load_rest(checkpoint, torch.device("cpu"), torch.float32)
        store = transformer.block_patches
        assert all(block.patches is store for block in transformer.blocks)
        with store.onload(0) as held:
            assert held.low_rank["self_attn.q"][0].down is patches.blocks[0].low_rank["self_attn.q"][0].down
        assert store.device_bytes == store.host_bytes == 0, "on the CPU they are read in place"
        gone = weakref.ref(store)
        transformer.release()
        del store
        gc.collect()
        assert gone() is None
        assert all(block.patches is None for block in transformer.blocks)


@pytest.mark.parametrize(
    ("name", "expert", "high", "low", "said"),
    [
        ("wan2.2_high_noise_lora", "auto", True, False, "applied to that one only"),
        ("wan2.2_low_noise_lora", "auto", False, True, "applied to that one only"),
        (
            "wan2.2_high_noise_lora",
            "low",
            False,
            True,
            "high-noise expert, as its file name says; it is applied to the low",
        ),
        ("wan2.2_high_noise_lora", "high", True, False, ""),
        ("wan2.2_high_noise_lora", "both", True, True, ""),
        ("style", "auto", True, True, ""),
        ("style", "low", False, True, ""),
    ],
)
def test_which_expert_a_lora_goes_to(folder, tmp_path, name, expert, high, low, said):
    path = write_lora(tmp_path / f"{name}.safetensors", lora_tensors(tiny_transformer("t2v-a14b")))
    loras = load_loras([LoraChoice(path, 1.0, expert)], pair(folder, "float32").transformers)
    assert [bool(patches.blocks) for patches in loras.patches] == [high, low]
    assert [bool(patches.rest) for patches in loras.patches] == [high, low]
    assert (said in " ".join(loras.notices)) if said else not loras.notices
    assert [item["expert"] for item in loras.applied] == [n for n, on in (("high", high), ("low", low)) if on]


def test_bad_choices(folder, tmp_path):
    path = write_lora(tmp_path / "a.safetensors", lora_tensors(tiny_transformer("t2v-a14b")))
    transformers = pair(folder, "float32").transformers
    for strength in (float("nan"), float("inf"), -float("inf")):
        with pytest.raises(InputError, match=r"lora_invalid.*strength"):
            load_loras([LoraChoice(path, strength)], transformers)
    with pytest.raises(InputError, match=r"lora_invalid.*middle"):
        load_loras([LoraChoice(path, 1.0, "middle")], transformers)
    with pytest.raises(InputError, match=r"lora_invalid.*without experts"):
        load_loras([LoraChoice(path, 1.0, "high")], [("", transformers[0][1])])
    assert load_loras([LoraChoice(path)], [("", transformers[0][1])]).applied[0]["expert"] == "single"


def test_the_bytes_that_are_counted_are_those_of_the_tensors(folder, tmp_path):
    tensors = lora_tensors(tiny_transformer("t2v-a14b"), kinds=KINDS, dtype=torch.bfloat16, alpha=None)
    path = write_lora(tmp_path / "a.safetensors", tensors)
    (patches, _) = load_loras([LoraChoice(path)], pair(folder, "float32").transformers).patches
    in_blocks = sum(tensor.nbytes for name, tensor in tensors.items() if ".blocks." in name)
    assert patches.nbytes(torch.bfloat16) == in_blocks
    assert in_blocks / 2 <= patches.largest(torch.bfloat16) < in_blocks
