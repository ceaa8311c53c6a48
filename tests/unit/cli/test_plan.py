"""`wanfit plan` from the command line, and the run that keeps to it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from wanfit.checkpoint import open_checkpoint
from wanfit.cli.main import main
from wanfit.tiny.models import write_tiny_models

BOAT = Path(__file__).resolve().parents[3] / "assets" / "boat.jpg"
SIZE = ["--width", "1280", "--height", "720", "--frames", "81"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    write_tiny_models(root)
    return root


def plan(capsys, *arguments: str):
    code = main(["plan", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_fits(capsys):
    code, said, _ = plan(capsys, "--model", "i2v-a14b:fp8", *SIZE, "--vram", "12", "--ram", "32")
    assert code == 0
    for word in ("Wan 2.2 I2V-A14B", "denoise high", "switch", "decode and save", "q, k, v", "verdict: fits"):
        assert word in said


def test_it_does_not_fit_and_says_what_does(capsys):
    code, said, _ = plan(capsys, "--model", "i2v-a14b:fp8", *SIZE, "--vram", "4", "--ram", "16", "--json")
    assert code == 1
    report = json.loads(said)
    assert report["verdict"] == "does not fit" and report["limiting_stage"] == "denoise high"
    assert report["fitting"][0]["width"] == 1280 and report["fitting"][0]["num_frames"] < 81
    for way in report["fitting"]:
        size = ["--width", str(way["width"]), "--height", str(way["height"]), "--frames", str(way["num_frames"])]
        assert plan(capsys, "--model", "i2v-a14b:fp8", *size, "--vram", "4", "--ram", "16")[0] == 0
    arguments = ("--model", "i2v-a14b:fp8", *SIZE, "--vram", "4", "--ram", "16", "--json", "--prefer", "length")
    assert json.loads(plan(capsys, *arguments)[1])["fitting"][0]["num_frames"] == 81


def test_the_size_is_chosen_when_it_is_left_open(capsys):
    code, said, _ = plan(capsys, "--model", "ti2v-5b:fp16", "--vram", "8", "--ram", "16", "--json")
    report = json.loads(said)
    assert code == 0 and (report["width"], report["height"], report["num_frames"]) == (1280, 704, 121)
    report = json.loads(plan(capsys, "--model", "i2v-a14b:fp16", "--vram", "4", "--ram", "16", "--json")[1])
    assert report["num_frames"] < 81 and report["verdict"] != "does not fit"
    assert plan(capsys, "--model", "i2v-a14b:fp16", "--vram", "1.5", "--ram", "16")[0] == 1


def test_files_instead_of_a_name(capsys, models):
    code, said, _ = plan(
        capsys, "--model", str(models), "--width", "96", "--height", "64", "--frames", "9", "--vram", "4"
    )
    assert code == 0 and "fp8_scaled" in said and "Q4_K_M" in said
    high = next((models / "diffusion_models").glob("*high*"))
    code, said, _ = plan(capsys, "--model", str(high), "--vram", "4", "--ram", "8")
    assert code == 0 and "one expert is given" in said and "umt5-xxl" in said


def test_speeds_give_the_slow_down(capsys):
    speeds = ("--bandwidth", "25", "--block-ms", "5", "--policy", "stream")
    said = plan(capsys, "--model", "t2v-a14b:fp8", *SIZE, "--vram", "12", "--ram", "64", *speeds)[1]
    assert "times as long" in said


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--model", "wan3:fp8", "--vram", "12"], ["[number_invalid]", "i2v-a14b"]),
        (["--model", "i2v-a14b:q9", "--vram", "12"], ["[number_invalid]", "q4_k_m"]),
        (["--model", "no-such-file.safetensors", "--vram", "12"], ["[file_missing]"]),
        (["--model", str(BOAT), "--vram", "12"], ["[file_unsupported]"]),
        (["--model", "i2v-a14b:fp8", "--vram", "-1"], ["[number_invalid]", "--vram"]),
        (["--model", "i2v-a14b:fp8", "--vram", "nan"], ["[number_invalid]", "--vram"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--ram", "0"], ["[number_invalid]", "--ram"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--width", "1280"], ["[size_invalid]", "--height"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--width", "1281", "--height", "720"], ["[size_invalid]", "16"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--width", "1280", "--height", "720", "--frames", "80"], ["4n+1"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--frames", "0"], ["--frames is 0", "4n+1"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--frames", "99999999999999999997"], ["4093"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--vram-used", "12"], ["--vram-used is 12.0 GiB", "12.0 GiB"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--batch", "0"], ["--batch is 0"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--chart", "model.safetensors"], ["model.png"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--chunk-tokens", "0"], ["--chunk-tokens"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--bandwidth", "0"], ["--bandwidth"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--policy", "fast"], ["--policy"]),
        (["--model", "i2v-a14b:fp8", "--vram", "12", "--capability", "ada"], ["--capability"]),
        (["--model", "t2v-a14b:fp8", "--vram", "12", "--image"], ["[image_unexpected]"]),
        (
            ["--model", "i2v-a14b:fp8", "--vram", "12", "--chart", "no-such-folder/c.png"],
            ["[output_unwritable]", "--chart"],
        ),
        (["--model", "t2v-a14b:fp8", "t2v-a14b:fp8", "t2v-a14b:fp8", "--vram", "12"], ["3 transformers"]),
    ],
)
def test_bad_input_is_refused_in_one_line(capsys, arguments, parts):
    code, _, said = plan(capsys, *arguments)
    assert code == 2 and said.startswith("wanfit: [") and said.count("\n") == 1
    for part in parts:
        assert part in said


def test_it_speaks_of_its_own_inputs(capsys, models):
    """`plan` has no --high and no --low."""
    high = str(next(models.rglob("*high*.safetensors")))
    code, _, said = plan(capsys, "--model", high, high, "--vram", "12")
    assert code == 2 and "the second file of --model is the high-noise expert" in said and "--low" not in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine must have no GPU")
def test_without_a_gpu_the_card_must_be_named(capsys):
    code, _, said = plan(capsys, "--model", "i2v-a14b:fp8")
    assert code == 2 and "--vram" in said


def generate(models, out: Path, *more: str) -> list[str]:
    size = ["--width", "96", "--height", "64", "--frames", "9", "--steps", "2"]
    return [
        "generate",
        "--model",
        str(models),
        "--image",
        str(BOAT),
        "--prompt",
        "a boat",
        *size,
        "--out",
        str(out),
        *more,
    ]


def test_a_run_that_cannot_fit_is_refused_before_weights_are_read(models, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("wanfit.memory.machine.available_bytes", lambda: 8 * 2**20)
    assert main(generate(models, tmp_path / "a.mp4")) == 2
    captured = capsys.readouterr()
    assert "[budget_exceeded]" in captured.err and "GiB of RAM" in captured.err and "stage: text" not in captured.out
    assert not list(tmp_path.iterdir())


def test_the_report_has_the_prediction_beside_the_measurement(models, tmp_path, capsys):
    report = tmp_path / "report.json"
    assert main(generate(models, tmp_path / "a.mp4", "--report", str(report), "--chart", str(tmp_path / "a.png"))) == 0
    said = json.loads(report.read_text(encoding="utf-8"))
    assert said["plan"]["verdict"] == "fits"
    for stage in said["memory"]["stages"]:
        assert stage["planned"]["ram_needed"] > 0
        own = stage["rss_peak"] - stage["rss_before"]
        # Resident memory grows by what the stage needs and by mapped files and libraries on their first use.
        assert own < stage["planned"]["ram_needed"] + 600 * 2**20
    assert said["memory"]["unread"]["device_used"]
    assert "plan: fits" in capsys.readouterr().out


@pytest.mark.parametrize("stage", ["encode_prompts", "denoise", "decode_to"])
def test_memory_that_runs_out_is_one_sentence(models, tmp_path, capsys, monkeypatch, stage):
    """PyTorch's real error of a request that no machine has memory for, in each stage."""
    monkeypatch.setattr(f"wanfit.pipeline.generate.{stage}", lambda *_, **__: torch.empty(2**46, dtype=torch.uint8))
    assert main(generate(models, tmp_path / "a.mp4")) == 3
    said = capsys.readouterr().err
    assert "Traceback" not in said
    last = said.splitlines()[-1].strip()
    assert last.startswith("wanfit: [run_failed] RAM is full in the stage ")
    sampled = stage == "decode_to"
    assert [path.name for path in tmp_path.iterdir()] == (["a.resume.safetensors"] if sampled else [])
    assert ("the same command with --resume" in last) == sampled


def test_an_unknown_error_is_not_hidden(models, tmp_path, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("a defect of ours")

    monkeypatch.setattr("wanfit.pipeline.generate.decode_to", broken)
    with pytest.raises(RuntimeError, match="a defect of ours"):
        main(generate(models, tmp_path / "a.mp4"))


def test_loras_count_and_the_chart_is_drawn(capsys, models, tmp_path):
    high = next(path for path in sorted(models.rglob("*.safetensors")) if "high" in path.name)
    with open_checkpoint(high) as checkpoint:
        out, inner = checkpoint.tensors["blocks.0.self_attn.q.weight"].shape
    key = "diffusion_model.blocks.{}.self_attn.q.lora_{}.weight"
    tensors = {}
    for block in range(2):
        tensors[key.format(block, "down")] = torch.ones(4, inner)
        tensors[key.format(block, "up")] = torch.ones(out, 4)
    lora = tmp_path / "lora.safetensors"
    save_file(tensors, lora)
    chart = tmp_path / "chart.png"
    common = ("--model", str(models), "--width", "96", "--height", "64", "--frames", "5", "--vram", "12", "--ram", "16")
    code, said, _ = plan(capsys, *common, "--lora", f"{lora}:0.5:both", "--chart", str(chart), "--json")
    plain = json.loads(plan(capsys, *common, "--json")[1])
    stages = {stage["name"]: stage for stage in json.loads(said)["stages"]}
    assert code == 0
    for stage in plain["stages"]:
        extra = stages[stage["name"]]["vram_needed"] - stage["vram_needed"]
        assert extra == (2 * 2 * 4 * (out + inner) if stage["name"].startswith("denoise") else 0), stage["name"]
    assert chart.read_bytes().startswith(b"\x89PNG") and chart.stat().st_size > 20_000


def test_a_batch_and_packed_attention_are_planned_and_searched_for(capsys):
    """Twice the activations for two videos; q, k and v of one byte where they took two."""
    size = ["--model", "t2v-a14b:fp8", "--width", "832", "--height", "480", "--frames", "81", "--ram", "32", "--json"]

    def denoise(*more: str) -> tuple[dict, dict]:
        report = json.loads(plan(capsys, *size, *more)[1])
        return report, report["stages"][1]["vram"]

    _, alone = denoise("--vram", "12")
    both, two = denoise("--vram", "12", "--batch", "2")
    packed, small = denoise("--vram", "12", "--packed")
    assert both["batch"] == 2 and two["q, k, v"] == 2 * alone["q, k, v"] and two["residual"] == 2 * alone["residual"]
    assert packed["packed_attention"] and 0.5 < small["q, k, v"] / alone["q, k, v"] < 0.52
    code, said, _ = plan(capsys, *size, "--vram", "4.5", "--batch", "4")
    assert code == 1
    for way in json.loads(said)["fitting"]:
        smaller = ["--width", str(way["width"]), "--height", str(way["height"]), "--frames", str(way["num_frames"])]
        assert plan(capsys, *size, *smaller, "--vram", "4.5", "--batch", "4")[0] == 0
    assert json.loads(plan(capsys, *size, "--vram", "4.5")[1])["verdict"] != "does not fit"
    code, said, _ = plan(capsys, *size[:-1], "--vram", "12", "--batch", "2", "--packed")
    assert code == 0 and "2 videos at a time, q, k and v packed in 8 bits" in said
    assert "0 to 40 blocks that stay" in plan(capsys, *size[:-1], "--vram", "24")[1], "auto does not promise"
    assert plan(capsys, *size, "--vram", "12", "--batch", "0")[0] == 2


def test_the_readme_shows_what_it_prints(capsys):
    """Each line under a command of the README's block, in that order."""
    text = (BOAT.parents[1] / "README.md").read_text(encoding="utf-8")
    block = text.partition("```\n$ wanfit plan")[2].partition("```")[0]
    commands = ("$ wanfit plan" + block).strip().split("$ wanfit ")[1:]
    assert [command.split("--vram ")[1].split()[0] for command in commands] == ["12", "16", "24"]
    for command in commands:
        arguments, *shown = command.strip().splitlines()
        assert main(arguments.split()) == 0
        printed = capsys.readouterr().out.splitlines()
        assert [line for line in printed if line in shown] == shown and len(shown) > 2


def test_a_plan_needs_no_diffusers():
    """Importing it takes longer than everything else together."""
    code = (
        "import sys; from wanfit.cli.main import main; "
        "main(['plan', '--model', 'ti2v-5b:fp16', '--width', '832', '--height', '480', '--vram', '12', '--ram', '32']); "
        "print(sorted({'diffusers', 'transformers', 'accelerate', 'peft'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]" and "verdict: fits" in done.stdout
