"""A run that was broken off goes on to the result of the undisturbed run, to the last bit."""

import dataclasses
import re

import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from tiny_run import latents_of, placement_on_cpu, settings_for

from wanfit.errors import CheckpointError, InputError, RunError
from wanfit.memory.alarm import Alarm, Margins
from wanfit.pipeline.files import ModelFiles
from wanfit.pipeline.loras import LoraChoice
from wanfit.pipeline.request import Request
from wanfit.pipeline.resume import Progress, beside, facts_of
from wanfit.tiny.layouts import write_plain
from wanfit.tiny.models import tiny_transformer, tiny_vae

CPU = torch.device("cpu")
STEPS = 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("resume")
    for variant in ("vae-2.1", "vae-2.2"):
        write_plain(root / f"{variant}.safetensors", tiny_vae(variant, base_dim=8), dtype=torch.float32)
    for seed, name in ((1, "high_noise"), (2, "low_noise")):
        write_plain(root / f"wan2.2_i2v_{name}.safetensors", tiny_transformer(seed=seed), dtype=torch.float32)
    write_plain(root / "wan2.2_ti2v_5B.safetensors", tiny_transformer("ti2v-5b", seed=3), dtype=torch.float32)
    Image.effect_noise((96, 72), 80).convert("RGB").save(root / "start.png")
    return root


def files_for(folder, model: str) -> ModelFiles:
    if model == "ti2v":
        single = folder / "wan2.2_ti2v_5B.safetensors"
        return ModelFiles(single, None, folder / "vae-2.2.safetensors", folder / "vae-2.2.safetensors")
    high, low = (folder / f"wan2.2_i2v_{name}.safetensors" for name in ("high_noise", "low_noise"))
    return ModelFiles(high, low, folder / "vae-2.1.safetensors", folder / "vae-2.1.safetensors")


class Case:
    """One run and its file."""

    def __init__(self, folder, tmp_path, model="i2v", **changes):
        self.files, self.said = files_for(folder, model), []
        if model == "ti2v":
            changes = {"width": 64, "height": 64} | changes
        options = {"steps": STEPS, "image": folder / "start.png", **changes}
        self.settings = settings_for(self.files, tmp_path / "a.mp4", **options)
        self.request = Request(prompt="a boat", out=tmp_path / "a.mp4")
        self.path = beside(tmp_path / "a.mp4")

    def progress(self, every=1, kind=Progress):
        facts = facts_of(self.files, self.request, self.settings, placement_on_cpu())
        return kind(self.path, facts, self.settings.steps, self.said.append, every)

    def run(self, progress=None, alarm=None, stages=None):
        return latents_of(self.files, self.settings, placement_on_cpu(), stages, progress=progress, alarm=alarm)


class BreaksAfter(Progress):
    at = 0

    def after_step(self, latents, scheduler):
        result = super().after_step(latents, scheduler)
        if self._done == self.at:
            raise KeyboardInterrupt
        return result


def broken(case, after, every=1):
    progress = case.progress(every, BreaksAfter)
    progress.at = after
    with pytest.raises(KeyboardInterrupt), progress:
        case.run(progress)
    return progress


@pytest.mark.parametrize(("model", "sampler"), [("i2v", "unipc"), ("i2v", "euler"), ("ti2v", "unipc")])
def test_the_result_is_that_of_the_undisturbed_run(folder, tmp_path, model, sampler):
    case = Case(folder, tmp_path, model, sampler=sampler)
    expected = case.run()
    for after in (1, 3, STEPS):
        broken(case, after)
        assert f"kept: {after} of {STEPS} steps" in case.said[-1]
        assert [p.name for p in tmp_path.iterdir()] == [case.path.name]
        again, stages = case.progress(), []
        again.resume()
        with again:
            assert torch.equal(case.run(again, stages=stages), expected)
        assert again.resumed == after
        if model == "i2v":
            high = case.settings.high_steps
            assert stages == (["denoise high"] if after < high else []) + (["denoise low"] if after < STEPS else [])
        assert not list(tmp_path.iterdir()), "a complete run leaves nothing"


def test_broken_off_twice_and_every_third_step(folder, tmp_path):
    """What is written when the run ends by an error is the last step, whatever the interval; a kill loses up to it."""
    case = Case(folder, tmp_path)
    expected = case.run()
    broken(case, 2, every=0)
    second = case.progress(3, BreaksAfter)
    second.resume()
    second.at = 5
    with pytest.raises(KeyboardInterrupt), second:
        case.run(second)
    third = case.progress()
    third.resume()
    with third:
        assert torch.equal(case.run(third), expected)
    assert third.resumed == 5


def test_the_alarm_stops_the_run_when_nothing_is_left_and_no_step_is_lost(folder, tmp_path):
    """The margin rises above what any machine has after two steps: packing and smaller chunks come before the stop."""
    case = Case(folder, tmp_path)
    expected = case.run()
    alarm = Alarm(CPU, Margins(0, 0), interval_s=0)

    class Pressed(Progress):
        def after_step(self, latents, scheduler):
            result = super().after_step(latents, scheduler)
            if self._done == 2:
                alarm.margins = Margins(0, 2**50)
            return result

    progress = case.progress(kind=Pressed)
    with pytest.raises(RunError, match="GiB of RAM are free") as caught, progress:
        case.run(progress, alarm)
    assert caught.value.code == "memory_low"
    assert "<resume>" in caught.value.change and str(case.path) in str(caught.value)
    done = progress._done
    again = case.progress()
    again.resume()
    assert again.resumed == done >= 2
    if done == 2:
        with again:
            assert torch.equal(case.run(again), expected)


def test_a_file_of_another_run_is_refused_with_the_difference(folder, tmp_path):
    broken(Case(folder, tmp_path), 2)
    for changes, said in (
        ({"seed": 4}, "seed was 0 and is 4"),
        ({"steps": 7}, "steps was 6 and is 7"),
        ({"sampler": "euler"}, "sampler was unipc and is euler"),
        ({"width": 80}, "width was 64 and is 80"),
        ({"last_image": folder / "start.png"}, "last_image was none"),
    ):
        case = Case(folder, tmp_path, **changes)
        with pytest.raises(InputError, match=said) as caught:
            case.progress().resume()
        assert caught.value.code == "resume_mismatch"


def test_another_lora_strength_or_file_of_that_name_is_refused(folder, tmp_path):
    path = tmp_path / "style.safetensors"
    path.write_bytes(bytes(100))

    def case_with(*loras: LoraChoice) -> Case:
        case = Case(folder, tmp_path)
        case.request = dataclasses.replace(case.request, loras=loras)
        return case

    broken(case_with(LoraChoice(path, 0.5, "high")), 2)
    case_with(LoraChoice(path, 0.5, "high")).progress().resume()
    was = "lora was style.safetensors (100 bytes) at 0.5 on high and is "
    for loras, now in (
        ([], "none"),
        ([LoraChoice(path, 0.25, "high")], "style.safetensors (100 bytes) at 0.25 on high"),
        ([LoraChoice(path, 0.5, "low")], "style.safetensors (100 bytes) at 0.5 on low"),
    ):
        with pytest.raises(InputError, match=re.escape(was + now)):
            case_with(*loras).progress().resume()
    path.write_bytes(bytes(101))
    with pytest.raises(InputError, match=re.escape(was + "style.safetensors (101 bytes) at 0.5 on high")):
        case_with(LoraChoice(path, 0.5, "high")).progress().resume()


def test_what_is_no_progress_file(folder, tmp_path):
    case = Case(folder, tmp_path)
    with pytest.raises(CheckpointError) as caught:
        case.progress().resume()
    assert caught.value.code == "file_missing"
    broken(case, 2)
    whole = case.path.read_bytes()
    save_file({"x": torch.zeros(2)}, str(tmp_path / "other.safetensors"))
    for content in (b"", whole[:200], whole[:-10], b"x" * 500, (tmp_path / "other.safetensors").read_bytes()):
        case.path.write_bytes(content)
        with pytest.raises(CheckpointError) as caught:
            case.progress().resume()
        assert caught.value.code == "file_damaged"


def test_a_disk_that_takes_nothing_costs_no_run(folder, tmp_path):
    case = Case(folder, tmp_path)
    expected = case.run()
    case.path = tmp_path / "missing" / "a.resume.safetensors"
    with case.progress() as progress:
        assert torch.equal(case.run(progress), expected)
    assert sum("cannot be kept" in said for said in case.said) == STEPS
