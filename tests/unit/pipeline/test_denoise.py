"""The host against diffusers' own pipelines with diffusers' own transformer, on the same tiny weights."""

import gc
import weakref
from functools import partial

import pytest
import torch
from diffusers import AutoencoderKLWan, WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from PIL import Image
from tiny_run import context, latents_of, placement_on_cpu, relative_error, settings_for

from wanfit.checkpoint import open_checkpoint, to_diffusers_transformer
from wanfit.errors import WanFitError
from wanfit.pipeline import experts as experts_module
from wanfit.pipeline.files import ModelFiles
from wanfit.pipeline.sampling import make_scheduler
from wanfit.pipeline.transformer import transformer_config
from wanfit.pipeline.vae import load_vae
from wanfit.tiny.gguf_layout import FILE_TYPES, write_gguf
from wanfit.tiny.layouts import (
    write_comfy_quant,
    write_comfy_scaled,
    write_diffusers_folder,
    write_kijai_scaled,
    write_original_folder,
    write_plain,
)
from wanfit.tiny.models import tiny_transformer, tiny_vae

# The lean forward rounds differently from diffusers' by at most 3e-7 a forward in float32 (test_forward);
# six forwards with guidance 3.5 amplify that.
SAME = 2e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("host")
    for variant in ("vae-2.1", "vae-2.2"):
        write_plain(root / f"{variant}.safetensors", tiny_vae(variant, base_dim=8), dtype=torch.float32)
    for seed, name in ((1, "high_noise"), (2, "low_noise")):
        for variant in ("i2v-a14b", "t2v-a14b"):
            weights = tiny_transformer(variant, seed=seed)
            write_plain(root / f"wan2.2_{variant[:3]}_{name}.safetensors", weights, dtype=torch.float32)
    write_plain(root / "wan2.2_ti2v_5B.safetensors", tiny_transformer("ti2v-5b", seed=3), dtype=torch.float32)
    picture = Image.effect_noise((96, 72), 80).convert("RGB")
    picture.save(root / "start.png")
    return root


def files_for(folder, model: str) -> ModelFiles:
    text = folder / "not needed"
    if model == "ti2v":
        return ModelFiles(folder / "wan2.2_ti2v_5B.safetensors", None, text, folder / "vae-2.2.safetensors")
    high, low = (folder / f"wan2.2_{model}_{name}.safetensors" for name in ("high_noise", "low_noise"))
    return ModelFiles(high, low, text, folder / "vae-2.1.safetensors")


def reference(files: ModelFiles, settings, expand: bool) -> torch.Tensor:
    """The same run by diffusers alone."""

    def transformer(path):
        with open_checkpoint(path) as checkpoint:
            model = WanTransformer3DModel(**transformer_config(checkpoint.identity))
            state = {to_diffusers_transformer(n): checkpoint.load(n).data.clone() for n in checkpoint.tensors}
        model.load_state_dict(state)
        return model.eval()

    with open_checkpoint(files.vae) as checkpoint:
        vae: AutoencoderKLWan = load_vae(checkpoint, torch.float32)
    kind = WanPipeline if settings.image is None else WanImageToVideoPipeline
    pipeline = kind(
        tokenizer=None,
        text_encoder=None,
        vae=vae,
        scheduler=make_scheduler(settings.sampler, settings.shift),
        transformer=transformer(files.high),
        transformer_2=None if files.low is None else transformer(files.low),
        boundary_ratio=settings.boundary_ratio,
        expand_timesteps=expand,
    )
    pipeline.set_progress_bar_config(disable=True)
    embeddings = context(settings)
    more = {} if settings.image is None else {"image": settings.image, "last_image": settings.last_image}
    if files.low is not None:
        more["guidance_scale_2"] = settings.guidance_scale_2
    return pipeline(
        prompt_embeds=embeddings[:1],
        negative_prompt_embeds=embeddings[1:] if len(embeddings) > 1 else None,
        width=settings.width,
        height=settings.height,
        num_frames=settings.num_frames,
        num_inference_steps=settings.steps,
        guidance_scale=settings.guidance_scale,
        generator=torch.Generator("cpu").manual_seed(settings.seed),
        output_type="latent",
        **more,
    ).frames


@pytest.mark.parametrize(
    ("model", "changes"),
    [
        ("i2v", {"image": "start.png"}),
        ("i2v", {"image": "start.png", "last_image": "start.png", "sampler": "euler"}),
        ("t2v", {}),
        ("t2v", {"guidance_scale": 1.0, "sampler": "euler"}),
        ("ti2v", {}),
        ("ti2v", {"image": "start.png"}),
    ],
)
def test_the_host_equals_diffusers(folder, tmp_path, model, changes):
    files = files_for(folder, model)
    changes = {key: folder / value if str(value).endswith(".png") else value for key, value in changes.items()}
    if model == "ti2v":
        changes["height"] = 64
    settings = settings_for(files, tmp_path / "a.mp4", **changes)
    stages: list[str] = []
    ours = latents_of(files, settings, placement_on_cpu(chunk_tokens=5), stages)
    theirs = reference(files, settings, model == "ti2v")
    assert ours.shape == theirs.shape and ours.dtype == torch.float32
    assert relative_error(ours, theirs) < SAME
    assert stages == (["denoise"] if model == "ti2v" else ["denoise high", "denoise low"])


def test_guidance_is_decided_for_the_expert_that_runs(folder, tmp_path):
    """diffusers looks at the high expert's scale for both: with 1.0 there, the low expert gets no guidance at all."""
    files = files_for(folder, "t2v")
    settings = settings_for(files, tmp_path / "a.mp4", guidance_scale=1.0, guidance_scale_2=4.0)
    plain = settings_for(files, tmp_path / "a.mp4", guidance_scale=1.0, guidance_scale_2=1.0)
    place = placement_on_cpu()
    with_low = latents_of(files, settings, place)
    assert relative_error(with_low, latents_of(files, plain, place)) > 0.02
    assert relative_error(reference(files, settings, False), reference(files, plain, False)) < 1e-6


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_same_seed_gives_the_same_latents_at_any_chunk_size(folder, tmp_path, chunk):
    files = files_for(folder, "t2v")
    settings = settings_for(files, tmp_path / "a.mp4")
    whole = latents_of(files, settings, placement_on_cpu(chunk_tokens=10_000))
    error = relative_error(latents_of(files, settings, placement_on_cpu(chunk_tokens=chunk)), whole)
    assert error < SAME
    other = settings_for(files, tmp_path / "a.mp4", seed=1)
    assert relative_error(latents_of(files, other, placement_on_cpu()), whole) > 0.1


CONFIG = {"_class_name": "WanTransformer3DModel", "in_channels": 16, "num_layers": 2}

# Error of the whole run against float32 weights: what the format itself loses, carried through six forwards
# with guidance. Bounds are two to three times what was measured; the figures are printed (pytest -s).
SAFETENSORS = {
    "bf16": (partial(write_plain, dtype=torch.bfloat16), 0.005),
    "fp16, model.diffusion_model.": (partial(write_plain, prefix="model.diffusion_model."), 0.0006),
    "fp16, diffusion_model.": (partial(write_plain, prefix="diffusion_model."), 0.0006),
    "fp32, diffusers names": (partial(write_plain, dtype=torch.float32, diffusers_names=True), 1e-6),
    "plain fp8 e4m3": (partial(write_plain, linear_dtype=torch.float8_e4m3fn), 0.06),
    "plain fp8 e5m2": (partial(write_plain, linear_dtype=torch.float8_e5m2), 0.12),
    "comfy scaled fp8": (write_comfy_scaled, 0.06),
    "comfy scaled fp8, full precision": (partial(write_comfy_scaled, full_precision=True), 0.06),
    "kijai scaled fp8": (write_kijai_scaled, 0.02),
    "kijai scaled fp8 e5m2": (partial(write_kijai_scaled, dtype=torch.float8_e5m2), 0.04),
    "comfy_quant fp8": (write_comfy_quant, 0.02),
    "comfy_quant fp8 in the header": (partial(write_comfy_quant, in_header=True), 0.02),
    "comfy_quant int8": (partial(write_comfy_quant, dtype=torch.int8), 0.008),
    "comfy_quant int8 by row": (partial(write_comfy_quant, dtype=torch.int8, per_row=True), 0.008),
    "comfy_quant int8 convrot": (
        partial(write_comfy_quant, dtype=torch.int8, per_row=True, convrot_groupsize=256),
        0.008,
    ),
}
FOLDERS = {
    "diffusers folder": (partial(write_diffusers_folder, config=CONFIG, max_shard_size="4MB"), 1e-6),
    "original folder": (partial(write_original_folder, max_shard_size="4MB"), 1e-6),
}
GGUF = {
    "F16": 0.0006, "BF16": 0.0015, "Q8_0": 0.004, "Q6_K": 0.012, "Q5_K_M": 0.02, "Q5_K_S": 0.02, "Q5_1": 0.03,
    "Q5_0": 0.03, "Q4_K_M": 0.04, "Q4_K_S": 0.04, "Q4_1": 0.05, "Q4_0": 0.06, "IQ4_NL": 0.05, "IQ4_XS": 0.05,
    "Q3_K_L": 0.1, "Q3_K_M": 0.1, "Q3_K_S": 0.1, "Q2_K": 0.15,
}  # fmt: skip
LAYOUTS = (
    {name: (write, ".safetensors", bound) for name, (write, bound) in SAFETENSORS.items()}
    | {name: (write, "", bound) for name, (write, bound) in FOLDERS.items()}
    | {f"gguf {kind}": (partial(write_gguf, file_type=kind), ".gguf", bound) for kind, bound in GGUF.items()}
)


def test_every_gguf_file_type_is_among_the_layouts():
    assert set(GGUF) == set(FILE_TYPES)


@pytest.fixture(scope="module")
def exact_latents(folder):
    files = files_for(folder, "t2v")
    settings = settings_for(files, folder / "a.mp4")
    return files, settings, latents_of(files, settings, placement_on_cpu())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_video_up_to_its_quantisation(exact_latents, tmp_path, layout):
    exact, settings, latents = exact_latents
    write, suffix, bound = LAYOUTS[layout]
    paths = [
        write(tmp_path / f"wan2.2_t2v_{name}{suffix}", tiny_transformer("t2v-a14b", seed=seed))
        for seed, name in ((1, "high_noise"), (2, "low_noise"))
    ]
    files = ModelFiles(paths[0], paths[1], exact.text_encoder, exact.vae)
    error = relative_error(latents_of(files, settings, placement_on_cpu()), latents)
    print(f"{layout}: relative error of the latents {error:.2e} (bound {bound})")
    assert error <= bound


def test_only_one_expert_holds_weights_and_none_after_the_run(folder, tmp_path, monkeypatch):
    files = files_for(folder, "t2v")
    settings = settings_for(files, tmp_path / "a.mp4")
    held: list[list[bool]] = []
    alive: list[weakref.ref] = []
    activate = experts_module.Experts.activate

    def observed(self, expert):
        activate(self, expert)
        held.append([not e.transformer.proj_out.weight.is_meta for e in self.experts])
        alive.extend(weakref.ref(e.transformer) for e in self.experts)

    monkeypatch.setattr(experts_module.Experts, "activate", observed)
    latents_of(files, settings, placement_on_cpu())
    assert [True, False] in held and [False, True] in held and [True, True] not in held
    gc.collect()
    assert not any(reference() for reference in alive)


def test_nan_in_the_latents_stops_the_run(folder, tmp_path):
    weights = tiny_transformer("t2v-a14b", seed=1)
    weights["head.head.bias"][0] = float("nan")
    files = files_for(folder, "t2v")
    high = write_plain(tmp_path / "wan2.2_t2v_high_noise.safetensors", weights, dtype=torch.float32)
    settings = settings_for(files, tmp_path / "a.mp4")
    with pytest.raises(WanFitError, match="step 1 of 3"):
        latents_of(ModelFiles(high, files.low, files.text_encoder, files.vae), settings, placement_on_cpu())
