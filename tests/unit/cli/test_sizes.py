"""`auto` as a size: the same in `plan` and in `generate`, and kept by a run that is resumed."""

import json

import pytest
import torch
from safetensors.torch import save_file

from wanfit.cli.main import main
from wanfit.errors import CheckpointError
from wanfit.memory.advice import Search
from wanfit.memory.machine import stated_machine
from wanfit.memory.parts import Model
from wanfit.memory.presets import text_preset, transformer_preset, vae_preset
from wanfit.pipeline.request import Request
from wanfit.pipeline.size import decide_size

CARD = ("--vram", "4", "--ram", "24", "--json")


@pytest.fixture(scope="module")
def search() -> Search:
    part = transformer_preset("t2v-a14b:q4_k_m")
    return Search(Model((part, part), text_preset(), vae_preset("vae-2.1")), stated_machine(4, 24))


def planned(capsys, *arguments: str) -> tuple[int, int, int]:
    main(["plan", "--model", "t2v-a14b:q4_k_m", *CARD, *arguments])
    report = json.loads(capsys.readouterr().out)
    return report["width"], report["height"], report["num_frames"]


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ((), {}),
        (("--portrait",), {"portrait": True}),
        (("--prefer", "length"), {"prefer": "length"}),
        (("--frames", "33"), {"num_frames": 33}),
    ],
)
def test_plan_and_generate_choose_the_same(capsys, search, tmp_path, options, changes):
    left_open = planned(capsys, *options)
    assert planned(capsys, "--width", "auto", "--height", "auto", *options) == left_open
    request, said = decide_size(
        Request(prompt="a", out=tmp_path / "a.mp4", width="auto", height="auto", **changes), search
    )
    assert (request.width, request.height, request.num_frames) == left_open
    assert "0.50 GiB that are left alone" in said


def test_a_given_size_and_an_automatic_length(capsys, search, tmp_path):
    request = Request(prompt="a", out=tmp_path / "a.mp4", width=1280, height=720, num_frames="auto")
    decided, _ = decide_size(request, search)
    assert (decided.width, decided.height) == (1280, 720) and 17 <= decided.num_frames < 81
    assert planned(capsys, "--width", "1280", "--height", "720", "--frames", "auto")[2] == decided.num_frames
    assert search.fitting(1280, 720, decided.num_frames + 4) is None


def test_a_resumed_run_keeps_what_was_decided(search, tmp_path):
    kept = tmp_path / "a.resume.safetensors"
    save_file({"latents": torch.zeros(1)}, str(kept), {"facts": json.dumps({"width": "640", "height": "352"})})
    request = Request(prompt="a", out=tmp_path / "a.mp4", width="auto", height="auto", num_frames=33)
    decided, _ = decide_size(request, search, kept)
    assert (decided.width, decided.height, decided.num_frames) == (640, 352, 33)
    with pytest.raises(CheckpointError, match="does not exist"):
        decide_size(request, search, tmp_path / "no.safetensors")


@pytest.mark.parametrize("command", ["plan", "generate"])
def test_neither_a_number_nor_auto(capsys, command):
    with pytest.raises(SystemExit):
        main([command, "--model", "x", "--width", "wide"])
    assert "neither a whole number nor auto" in capsys.readouterr().err


def test_auto_for_one_side_alone(capsys, tmp_path):
    command = ["generate", "--model", "x", "--prompt", "a", "--out", str(tmp_path / "a.mp4"), "--width", "auto"]
    assert main([*command, "--height", "480"]) == 2
    assert "only one of --width (auto) and --height (480)" in capsys.readouterr().err
