"""`wanfit generate --lora`: the argument, its effect on the video, and every refusal."""

import json
from pathlib import Path, PureWindowsPath

import pytest
import torch
from PIL import Image

from wanfit.cli.loras import read_lora
from wanfit.cli.main import main
from wanfit.errors import InputError
from wanfit.pipeline.loras import LoraChoice
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.lora import KINDS, lora_tensors, write_lora
from wanfit.tiny.models import tiny_transformer, write_tiny_models


@pytest.mark.parametrize(
    ("text", "path", "strength", "expert"),
    [
        ("a.safetensors", "a.safetensors", 1.0, "auto"),
        ("a.safetensors:0.8", "a.safetensors", 0.8, "auto"),
        ("a.safetensors:-1.5:low", "a.safetensors", -1.5, "low"),
        ("a.safetensors:high", "a.safetensors", 1.0, "high"),
        ("a.safetensors:1e-1:both", "a.safetensors", 0.1, "both"),
        ("/x/high:a.safetensors:2", "/x/high:a.safetensors", 2.0, "auto"),
        (r"C:\loras\a.safetensors", r"C:\loras\a.safetensors", 1.0, "auto"),
        (r"C:\loras\a.safetensors:0.5", r"C:\loras\a.safetensors", 0.5, "auto"),
        (r"C:\loras\a.safetensors:0.5:high", r"C:\loras\a.safetensors", 0.5, "high"),
        ("D:/loras/a.safetensors", "D:/loras/a.safetensors", 1.0, "auto"),
    ],
)
def test_the_argument_is_read_from_its_end(text, path, strength, expert):
    assert read_lora(text) == LoraChoice(Path(path), strength, expert)
    if "\\" in path:
        assert PureWindowsPath(path).drive == "C:"


def test_a_file_whose_name_looks_like_an_argument_is_a_file(tmp_path):
    path = tmp_path / "a:0.5"
    path.touch()
    assert read_lora(str(path)) == LoraChoice(path, 1.0, "auto")


@pytest.mark.parametrize("text", ["a.safetensors:strong", "a.safetensors:0.5:middle", "a.safetensors:0.5:", ""])
def test_arguments_that_cannot_be_read(text):
    with pytest.raises(InputError, match="lora_invalid"):
        read_lora(text)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_models(root / "all")
    Image.new("RGB", (64, 48), "teal").save(root / "start.png")
    weights = tiny_transformer()
    write_lora(root / "style.safetensors", lora_tensors(weights, kinds=KINDS, size=1.0))
    write_lora(root / "wan2.2_low_noise_lora.safetensors", lora_tensors(weights, dialect="kohya", size=1.0))
    write_lora(root / "wide.safetensors", lora_tensors(tiny_transformer(dim=512, num_layers=1)))
    flux = {f"lora_unet_double_blocks_0_img_attn_qkv.lora_{n}.weight": torch.ones(4, 4) for n in ("down", "up")}
    write_lora(root / "flux.safetensors", flux)
    dora = lora_tensors(weights) | {"diffusion_model.blocks.0.ffn.0.dora_scale": torch.ones(512, 1)}
    write_lora(root / "dora.safetensors", dora)
    (root / "cut.safetensors").write_bytes((root / "style.safetensors").read_bytes()[:5000])
    write_plain(root / "model.safetensors", weights)
    return root


@pytest.fixture
def generate(models, tmp_path, capfd):
    def run(*loras: str, name: str = "a"):
        out = tmp_path / f"{name}.mp4"
        command = ["generate", "--model", models / "all", "--image", models / "start.png", "--prompt", "a boat"]
        command += ["--width", "64", "--height", "48", "--frames", "5", "--steps", "2", "--guidance", "1"]
        for lora in loras:
            command += ["--lora", f"{models}/{lora}"]
        code = main([str(part) for part in (*command, "--out", out, "--report", tmp_path / f"{name}.json")])
        return code, capfd.readouterr(), out

    return run


def test_a_lora_changes_the_video_and_is_reported(generate, models, tmp_path):
    plain = generate(name="plain")[2].read_bytes()
    assert generate("style.safetensors:0", name="zero")[2].read_bytes() == plain
    code, said, out = generate("style.safetensors:0.9", "wan2.2_low_noise_lora.safetensors:0.5")
    assert code == 0 and out.read_bytes() != plain
    assert "style.safetensors x 0.9 on high: " in said.out and "style.safetensors x 0.9 on low: " in said.out
    assert "wan2.2_low_noise_lora.safetensors x 0.5 on low" in said.out
    assert "note: wan2.2_low_noise_lora.safetensors is a LoRA of the low-noise expert" in said.out
    report = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["loras"]
    assert [(Path(item["file"]).stem, item["expert"]) for item in report] == [
        ("style", "high"),
        ("style", "low"),
        ("wan2.2_low_noise_lora", "low"),
    ]


@pytest.mark.parametrize(
    ("lora", "parts"),
    [
        ("style.safetensors:nan", ["[lora_invalid]", "strength nan"]),
        ("style.safetensors:inf", ["[lora_invalid]", "strength inf"]),
        ("style.safetensors:much", ["[lora_invalid]", "--lora", "'much'", "FILE:0.8:high"]),
        ("no.safetensors:1", ["[file_missing]", "no.safetensors"]),
        ("cut.safetensors:1", ["[file_damaged]", "cut.safetensors"]),
        ("start.png:1", ["[file_unsupported]"]),
        ("model.safetensors:1", ["[model_unknown]", "not a LoRA"]),
        ("flux.safetensors:1", ["[lora_mismatch]", "Flux", "Wan 2.2 I2V-A14B"]),
        ("wide.safetensors:1", ["[lora_mismatch]", "512x512", "256x256"]),
        ("dora.safetensors:1", ["[lora_unsupported]", "DoRA"]),
    ],
)
def test_refusals_end_before_anything_is_written(generate, tmp_path, lora, parts):
    code, said, _ = generate(lora)
    assert code == 2
    assert said.err.startswith("wanfit: [") and said.err.count("\n") == 1, said.err
    for part in parts:
        assert part in said.err, said.err
    assert not list(tmp_path.iterdir())
