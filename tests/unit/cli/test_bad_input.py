"""Everything a user can get wrong: one clear sentence, exit code 2, no traceback, nothing half-written."""

import json
import os
import shutil
import struct

import pytest
import torch
from PIL import Image

from wanfit.cli.main import main
from wanfit.pipeline.files import find_model
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.models import tiny_transformer, tiny_vae, write_tiny_models

HIGH = "diffusion_models/wan2.2_i2v_high_noise_14B_fp8_scaled.safetensors"
LOW = "diffusion_models/Wan2.2-I2V-A14B-LowNoise-Q4_K_M.gguf"
TEXT = "text_encoders/umt5_xxl_fp8_e4m3fn_scaled.safetensors"
VAE = "vae/wan_2.1_vae.safetensors"
SMALL = ["--width", "64", "--height", "48", "--frames", "5", "--steps", "2"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_models(root)
    extra = root.parent / "extra"
    write_plain(extra / "wan2.2_vae.safetensors", tiny_vae("vae-2.2", base_dim=8))
    write_plain(extra / "wan2.2_ti2v_5B.safetensors", tiny_transformer("ti2v-5b"))
    for name in ("high", "low"):
        write_plain(extra / f"wan2.2_t2v_{name}_noise_14B.safetensors", tiny_transformer("t2v-a14b"))
    Image.new("RGB", (64, 48), "teal").save(extra / "start.png")
    return root


@pytest.fixture
def generate(models, tmp_path, capfd):
    """Run `wanfit generate` on the tiny models; arguments given override the defaults; returns code, stderr."""

    def run(*arguments: str, image: bool = True, size: bool = True, prompt: bool = True):
        out = tmp_path / "out" / "a.mp4"
        out.parent.mkdir(exist_ok=True)
        command = ["generate", "--out", str(out)]
        if not {"--model", "--high"} & set(arguments):
            command += ["--model", str(models)]
        command += ["--image", str(models.parent / "extra" / "start.png")] if image else []
        command += SMALL if size else []
        command += ["--prompt", "a boat"] if prompt else []
        code = main([*command, *map(str, arguments)])
        said = capfd.readouterr().err
        assert not list(out.parent.iterdir()), "something was left behind"
        return code, said

    return run


def check(result, *parts: str):
    code, said = result
    assert code == 2
    assert said.startswith("wanfit: [") and "Traceback" not in said and said.count("\n") == 1, said
    for part in parts:
        assert part in said, said


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--width", "65", "--height", "48"], ["[size_invalid]", "--width 65", "64 or 80"]),
        (["--width", "1920", "--height", "1080"], ["1072 or 1088", "multiple of 16"]),
        (["--width", "0"], ["--width is 0"]),
        (["--height", "-16"], ["--height is -16"]),
        (["--frames", "80"], ["[frames_invalid]", "--frames is 80", "77 or 81"]),
        (["--frames", "0"], ["--frames is 0", "1 or 5"]),
        (["--frames", "-3"], ["--frames is -3"]),
        (["--steps", "0"], ["[number_invalid]", "--steps is 0"]),
        (["--fps", "-1"], ["--fps is -1"]),
        (["--seed", "-1"], ["--seed is -1"]),
        (["--shift", "nan"], ["--shift is nan"]),
        (["--boundary", "1.5"], ["--boundary is 1.5", "0 to 1"]),
        (["--guidance", "-2"], ["--guidance is -2"]),
        (["--sampler", "dpm"], ["--sampler is 'dpm'", "unipc, euler"]),
        (["--chunk-tokens", "0"], ["--chunk-tokens is 0"]),
        (["--device", "cuda:99"], ["--device is 'cuda:99'"]),
        (["--device", "tpu9"], ["--device is 'tpu9'"]),
        (["--text", "gpu"], ["--text is 'gpu'", "auto, cpu, stream"]),
        (["--policy", "all"], ["--policy is 'all'", "resident, stream, auto"]),
        (["--vram-budget", "0"], ["--vram-budget is 0.0 GiB"]),
        (["--dtype", "int8"], ["--dtype is 'int8'", "bfloat16"]),
        (["--prompt", "  "], ["[prompt_invalid]", "--prompt is empty"]),
        (["--prompt", "a very long story " * 400], ["[prompt_invalid]", "512", "words"]),
        (["--image", "no.png"], ["[image_invalid]", "no.png does not exist"]),
        (["--last-image", "no.png"], ["--last-image no.png does not exist"]),
        (["--out", "a.avi"], ["[output_unwritable]", "a.mp4"]),
        (["--out", "no/such/folder/a.mp4"], ["does not exist"]),
        (["--out", "/proc/wanfit.mp4"], ["[output_unwritable]"]),
        (["--report", "no/such/r.json"], ["--report"]),
        (["--report", "/proc"], ["--report /proc is a folder"]),
        (["--report", "r.mp4"], ["--report is r.mp4", "r.json"]),
        (["--chart", "no/such/c.png"], ["--chart", "Create it first"]),
        (["--chart", "a.mp4"], ["--chart is a.mp4", "a.png"]),
        (["--out", ""], ["--out . is a folder", "Give the name of a file"]),
        (["--out", "/"], ["--out / is a folder", "/result.mp4"]),
        (["--frames", "100000001"], ["--frames is 100000001", "4093"]),
        (["--steps", "1000000000"], ["--steps is 1000000000", "1 to 1000"]),
        (["--fps", "100000000000"], ["--fps is 100000000000", "1 to 1000"]),
        (["--image", "/"], ["--image / is no file"]),
        (["--resume", "/"], ["--resume / is no file", ".resume.safetensors"]),
        (["--model", "no-such-folder"], ["[file_missing]", "no-such-folder", "Check the path"]),
        (["--model", __file__], ["is not a folder", "--high", "--vae"]),
    ],
)
def test_numbers_prompts_and_outputs(generate, arguments, parts):
    check(generate(*arguments), *parts)


def test_a_chart_in_place_of_the_start_image(generate, models):
    start = models.parent / "extra" / "start.png"
    before = start.read_bytes()
    check(generate("--chart", start.parent / ".." / "extra" / "start.png"), "--chart", "would replace the image")
    assert start.read_bytes() == before


def test_one_of_width_and_height_alone(generate):
    check(generate("--width", "64", size=False), "--width", "--height")


def test_an_i2v_model_needs_an_image_and_a_t2v_model_takes_none(generate, models):
    extra = models.parent / "extra"
    check(generate(image=False), "[image_missing]", "36 input channels", "--image")
    pair = ["--high", extra / "wan2.2_t2v_high_noise_14B.safetensors"]
    pair += ["--low", extra / "wan2.2_t2v_low_noise_14B.safetensors"]
    rest = ["--text-encoder", models / TEXT, "--vae", models / VAE]
    check(generate(*pair, *rest), "[image_unexpected]", "16 input channels")


def test_wrong_pairs_and_parts(generate, models):
    extra = models.parent / "extra"
    text = ["--text-encoder", models / TEXT]
    vae = ["--vae", models / VAE]
    check(
        generate("--high", models / HIGH, "--low", models / HIGH, *text, *vae), "[pair_mismatch]", "--low is the high"
    )
    check(generate("--high", models / LOW, "--low", models / HIGH, *text, *vae), "Swap the two files")
    t2v = extra / "wan2.2_t2v_low_noise_14B.safetensors"
    check(generate("--high", models / HIGH, "--low", t2v, *text, *vae), "36 channels in", "16 channels in")
    check(generate("--high", models / HIGH, *text, *vae), "[part_missing]", "--low is not given")
    check(generate("--vae", extra / "wan2.2_vae.safetensors"), "48 latent channels", "wan_2.1_vae.safetensors")
    five = ["--high", extra / "wan2.2_ti2v_5B.safetensors", "--width", "64", "--height", "64"]
    check(generate(*five, *text, *vae), "16 latent channels", "wan2.2_vae.safetensors")
    check(generate("--vae", models / TEXT), "--vae holds a text encoder, not a VAE", "Give the file of the VAE")
    check(generate("--model", models, "--high", models / VAE), "--high holds a VAE, not a transformer")
    check(generate("--high", models / HIGH, "--low", models / LOW, *vae), "--text-encoder")


def test_a_last_image_needs_more_than_one_frame(generate, models):
    start = models.parent / "extra" / "start.png"
    check(generate("--last-image", start, "--frames", "1"), "--frames is 1", "--last-image")


def test_a_5b_size_is_a_multiple_of_32(generate, models):
    extra = models.parent / "extra"
    parts = ["--text-encoder", models / TEXT, "--vae", extra / "wan2.2_vae.safetensors"]
    five = ["--high", extra / "wan2.2_ti2v_5B.safetensors", "--width", "1280", "--height", "720"]
    check(generate(*five, *parts), "multiple of 32", "704 or 736")


def test_numbers_of_a_second_expert_for_one_model(generate, models):
    extra = models.parent / "extra"
    five = ["--high", extra / "wan2.2_ti2v_5B.safetensors", "--vae", extra / "wan2.2_vae.safetensors"]
    five += ["--text-encoder", models / TEXT, "--width", "64", "--height", "64"]
    check(generate(*five, "--boundary", "0.9"), "--boundary is 0.9", "one model without a switch")
    check(generate(*five, "--guidance-low", "3"), "--guidance-low is 3.0", "one model without a switch")


def test_transparency_in_the_start_image(generate, tmp_path):
    Image.new("RGBA", (64, 48), (1, 2, 3, 0)).save(tmp_path / "ghost.png")
    check(generate("--image", tmp_path / "ghost.png"), "transparent in 100.0 %")


def lying_header(path, edit):
    """Change the JSON header of a safetensors file in place, length field included."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])


def past_the_end(header):
    name = next(key for key in header if key != "__metadata__")
    header[name]["data_offsets"] = [10**12, 10**12 + 4]


def overlapping(header):
    first, second = [key for key in header if key != "__metadata__"][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]


DAMAGE = {
    "truncated safetensors": (HIGH, lambda path: path.write_bytes(path.read_bytes()[:-1000])),
    "truncated gguf": (LOW, lambda path: path.write_bytes(path.read_bytes()[:-1000])),
    "empty": (VAE, lambda path: path.write_bytes(b"")),
    "offsets past the end": (HIGH, lambda path: lying_header(path, past_the_end)),
    "overlapping tensors": (HIGH, lambda path: lying_header(path, overlapping)),
    "huge header": (HIGH, lambda path: path.write_bytes(struct.pack("<Q", 2**60) + b"{}")),
    "not a model": (TEXT, lambda path: path.write_text("<html>Not found</html>")),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(generate, models, tmp_path, damage):
    role, spoil = DAMAGE[damage]
    copy = tmp_path / "models"
    shutil.copytree(models, copy)
    spoil(copy / role)
    flag = {HIGH: "--high", LOW: "--low", TEXT: "--text-encoder", VAE: "--vae"}[role]
    check(generate(flag, copy / role, "--model", models), (copy / role).name)


def test_a_pickle_is_refused_with_the_way_to_convert(generate, tmp_path):
    torch.save({"a": torch.zeros(1)}, tmp_path / "Wan2.1_VAE.pth")
    check(generate("--vae", tmp_path / "Wan2.1_VAE.pth"), "[file_unsupported]", "safetensors")


def test_a_folder_whose_vae_is_damaged_is_not_said_to_have_none(generate, models, tmp_path):
    shutil.copytree(models, tmp_path / "models")
    (tmp_path / "models" / VAE).write_bytes(b"")
    check(generate("--model", tmp_path / "models"), "no file for --vae", "that can be used", "wan_2.1_vae.safetensors")


@pytest.mark.skipif(os.name == "nt", reason="links need a right of their own on Windows")
def test_linked_folders_are_looked_into_once(models, tmp_path):
    """ComfyUI's model folders are often links to another disk; a link may lead back."""
    (tmp_path / "diffusion_models").symlink_to(models / "diffusion_models")
    for name in ("text_encoders", "vae"):
        shutil.copytree(models / name, tmp_path / name)
    (tmp_path / "vae" / "again").symlink_to(tmp_path)
    found = find_model(tmp_path)
    assert found.high == tmp_path / HIGH and found.low == tmp_path / LOW


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(generate, models, tmp_path, capfd):
    shutil.copytree(models, tmp_path / "models")
    (tmp_path / "models" / "vae").chmod(0)
    check(generate("--model", tmp_path / "models"), "[file_unreadable]", "vae cannot be opened")
    assert main(["inspect", str(tmp_path / "models" / "vae")]) == 2
    assert "[file_unreadable]" in capfd.readouterr().err
    (tmp_path / "models" / "vae").chmod(0o700)


def test_a_folder_with_two_files_for_one_part(generate, models, tmp_path):
    copy = tmp_path / "models"
    shutil.copytree(models, copy)
    shutil.copy(copy / VAE, copy / "vae" / "another.safetensors")
    check(generate("--model", copy), "[part_ambiguous]", "another.safetensors", "--vae")
    shutil.copy(copy / HIGH, copy / "diffusion_models" / "high_noise_too.safetensors")
    check(generate("--model", copy), "2 files for --high", "2 files for --vae", "Say which with --high and --vae.")
    find_model(copy, high=copy / HIGH, low=copy / LOW, vae=copy / VAE)  # what is said decides


def test_inspect_says_what_is_wrong_with_a_pair(models, capfd):
    assert main(["inspect", str(models / LOW), str(models / HIGH)]) == 0
    assert "fit together" in capfd.readouterr().out
    assert main(["inspect", str(models / HIGH), str(models / HIGH)]) == 2
    said = capfd.readouterr()
    assert "the second transformer is the high-noise expert" in said.err
    assert main(["inspect", str(models / HIGH), str(models.parent / "extra" / "wan2.2_vae.safetensors")]) == 2
    assert "wan_2.1_vae.safetensors" in capfd.readouterr().err


def test_inspect_as_json(models, capfd):
    assert main(["inspect", "--json", *(str(models / part) for part in (HIGH, LOW, TEXT, VAE))]) == 0
    listed = json.loads(capfd.readouterr().out)["files"]
    assert [item["kind"] for item in listed] == ["transformer", "transformer", "text_encoder", "vae"]
    assert [item["expert"] for item in listed[:2]] == ["high", "low"]
    assert "q4_k" in listed[1]["formats"]


def test_inspect_names_each_model_of_a_folder_and_what_is_none(models, tmp_path, capfd):
    """As `--model` of `plan` and `generate` takes it; none is passed over."""
    shutil.copytree(models, tmp_path / "models")
    (tmp_path / "models" / "vae" / "broken.safetensors").write_bytes(b"")
    for folder in (tmp_path / "models", tmp_path / "models" / "diffusion_models"):
        assert main(["inspect", str(folder)]) == 0
        said = capfd.readouterr().out
        assert "high-noise expert (from the file name)" in said and "low-noise expert (from the file name)" in said
    assert main(["inspect", str(tmp_path / "models"), "--json"]) == 0
    listed = json.loads(capfd.readouterr().out)["files"]
    assert len(listed) == 5 and "[file_damaged]" in listed[-1]["refused"]
    (tmp_path / "models" / LOW).unlink()
    assert main(["inspect", str(tmp_path / "models" / "diffusion_models")]) == 0
    assert "high-noise expert (from the file name)" in capfd.readouterr().out


def test_links_that_lead_nowhere(tmp_path, capfd):
    (tmp_path / "a.safetensors").symlink_to(tmp_path / "b.safetensors")
    (tmp_path / "b.safetensors").symlink_to(tmp_path / "a.safetensors")
    assert main(["inspect", str(tmp_path / "a.safetensors")]) == 2
    assert "is a link to" in capfd.readouterr().err


@pytest.mark.parametrize("seed", ["-1", "99999999999999999999"])
def test_tiny_with_a_seed_that_cannot_be(tmp_path, capfd, seed):
    assert main(["tiny", "--out", str(tmp_path), "--seed", seed]) == 2
    assert f"--seed is {seed}" in capfd.readouterr().err and not list(tmp_path.iterdir())


def test_tiny_into_a_place_that_cannot_be_written(tmp_path, capfd):
    (tmp_path / "file").write_text("in the way")
    assert main(["tiny", "--out", str(tmp_path / "file" / "models")]) == 2
    assert "[output_unwritable]" in capfd.readouterr().err
