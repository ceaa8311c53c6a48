"""What a plan predicts against what PyTorch's CPU allocator really gives out, at tiny sizes."""

import pytest
import torch
from alloc_tracker import peak_bytes

from wanfit.blocks import ForwardSettings
from wanfit.checkpoint import open_checkpoint
from wanfit.memory.demand import Video, forward_causes, vae_demand
from wanfit.memory.machine import Machine
from wanfit.memory.parts import Model, VaePart, transformer_part, vae_part
from wanfit.memory.presets import text_preset, transformer_preset
from wanfit.memory.tiles import decode_shape, tile_plan
from wanfit.offload import Ladder, MappedBlocks
from wanfit.pipeline.transformer import build_transformer
from wanfit.pipeline.vae import load_vae
from wanfit.tiny.gguf_layout import write_gguf
from wanfit.tiny.layouts import write_comfy_scaled, write_plain
from wanfit.tiny.models import tiny_transformer, tiny_vae
from wanfit.vae.decode import decode
from wanfit.vae.sinks import OrderedFrames

MIB = 2**20
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    wide = {"dim": 512, "ffn_dim": 1536}
    return {
        "fp16": write_plain(folder / "wan2.2_i2v_high_noise.safetensors", tiny_transformer("i2v-a14b", **wide)),
        "fp8": write_comfy_scaled(folder / "wan2.2_t2v_high_noise.safetensors", tiny_transformer("t2v-a14b", **wide)),
        "q4_k_m": write_gguf(folder / "i2v_high_noise.gguf", tiny_transformer("i2v-a14b", **wide), "Q4_K_M"),
        "5b": write_plain(folder / "wan2.2_ti2v_5B.safetensors", tiny_transformer("ti2v-5b", **wide)),
    }


@pytest.mark.parametrize(
    ("name", "dtype", "chunk", "size", "batch"),
    [
        ("fp16", torch.float32, 1024, (320, 256, 33), 1),
        ("fp16", torch.bfloat16, 256, (256, 192, 21), 1),
        ("fp8", torch.float32, 512, (320, 256, 33), 1),
        ("fp8", torch.float32, 512, (256, 192, 33), 2),
        ("q4_k_m", torch.float32, 256, (256, 192, 33), 1),
        ("5b", torch.float32, 256, (512, 384, 33), 1),
        ("5b", torch.float32, 256, (384, 256, 33), 3),
    ],
)
def test_a_forward_of_the_transformer(files, name, dtype, chunk, size, batch):
    """Bound from above, and near: 10 % and the 2 MiB that the block's formula adds for norms and rows."""
    video = Video(*size, image=False, size_multiple=32 if name == "5b" else 16, batch=batch)
    settings = ForwardSettings(chunk)
    with open_checkpoint(files[name]) as checkpoint:
        part = transformer_part(checkpoint)
        model = build_transformer(checkpoint, MappedBlocks(checkpoint, CPU), Ladder(settings), dtype)
        model.load_rest(checkpoint, CPU, dtype)
        step = video.size_multiple // 2
        latents = torch.randn(
            batch, part.in_channels, video.latent_frames, video.height // step, video.width // step, dtype=dtype
        )
        text = torch.randn(batch, 512, 4096, dtype=dtype)
        tokens: list[int] = []
        model.blocks[0].register_forward_pre_hook(lambda _, inputs: tokens.append(inputs[0].shape[1]))
        with torch.no_grad():
            actual = peak_bytes(lambda: model(latents, torch.full((batch,), 500.0), text, return_dict=False))
    causes = forward_causes(part, video, Machine("cpu", 0, 2**40, dtype=dtype), settings)
    # What the loop holds outside of a forward is not allocated by it.
    planned = sum(nbytes for cause, nbytes in causes.items() if cause not in ("latents", "text embeddings"))
    print(f"{name}: {actual / MIB:.1f} of {planned / MIB:.1f} MiB, {video.tokens} tokens")
    assert tokens == [video.tokens]
    assert actual <= planned <= 1.1 * actual + 2 * MIB


@pytest.mark.parametrize(
    ("variant", "size", "share"),
    [
        ("vae-2.1", (256, 256, 5), None),
        ("vae-2.1", (256, 192, 5), None),
        ("vae-2.1", (192, 128, 5), None),
        ("vae-2.1", (320, 192, 5), None),
        ("vae-2.1", (256, 192, 5), 0.5),
        ("vae-2.1", (384, 256, 5), 0.4),
        ("vae-2.1", (320, 192, 5), 0.6),
        ("vae-2.2", (256, 192, 5), None),
        ("vae-2.2", (384, 256, 5), None),
        ("vae-2.2", (320, 192, 5), 0.7),
    ],
)
def test_a_decode(tmp_path, variant, size, share):
    """No more than 2 % under and 12 % over; the plan takes the larger of the two passes with all features waiting.

    Of all kinds: where oneDNN packs its inputs, where the first frame's convolutions are small enough for PyTorch's own
    with its matrix of patches, and in tiles. Mostly within 3 %; 10 % over where PyTorch does not pack.
    """
    path = write_plain(tmp_path / "vae.safetensors", tiny_vae(variant, base_dim=32))
    name = "i2v-a14b:fp16" if variant == "vae-2.1" else "ti2v-5b:fp16"
    with open_checkpoint(path) as checkpoint:
        part: VaePart = vae_part(checkpoint)
        vae = load_vae(checkpoint, torch.float32)
    model = Model((transformer_preset(name),), text_preset(), part)
    video = Video(*size, image=False, size_multiple=16 if variant == "vae-2.1" else 32)
    machine = Machine("cpu", 0, 2**40, dtype=torch.float32, vae_dtype=torch.float32)
    plan = tile_plan(model, video, machine, "decode", 2**40)
    demand = vae_demand("decode and save", plan, part, video, machine)
    if share is not None:
        room = int(demand.ram_needed * share)
        plan = tile_plan(model, video, machine, "decode", room)
        demand = vae_demand("decode and save", plan, part, video, machine)
        assert plan.tiles > 1 and demand.ram_needed <= room
    latents = torch.randn(decode_shape(model, video))
    seen: list[int] = []

    def run() -> None:
        sink = OrderedFrames(lambda _item, number, _pixels: seen.append(number))
        try:
            decode(vae, latents, plan, sink)
        finally:
            sink.close()

    actual = peak_bytes(run)
    # Not allocated by the decode: weights, latents, the video encoder that this test has not.
    planned = demand.ram_needed - sum(demand.ram[cause] for cause in ("VAE", "latents", "video encoder"))
    print(f"{variant} {plan.grid}: {actual / MIB:.1f} of {planned / MIB:.1f} MiB: {dict(demand.ram)}")
    assert seen == list(range(video.num_frames))
    assert 0.98 * actual <= planned <= 1.12 * actual
