"""The shipped workflow files against the recipes in the code. No ComfyUI."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def load_by_path(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


recipes = load_by_path("wanfit_test_recipes", ROOT / "nodes" / "recipes.py")
maker = load_by_path("wanfit_test_maker", ROOT / "scripts" / "make_workflows.py")
NAMES = list(recipes.RECIPES)


def workflow(name: str) -> dict[str, Any]:
    return json.loads((ROOT / "workflows" / f"{name}.json").read_text(encoding="utf-8"))


def values(name: str, kind: str) -> list[list[Any]]:
    return [node["widgets_values"] for node in workflow(name)["nodes"] if node["type"] == kind]


def test_one_file_and_one_thumbnail_for_each_recipe() -> None:
    folder = ROOT / "workflows"
    assert sorted(path.stem for path in folder.glob("*.json")) == sorted(NAMES)
    assert sorted(path.stem for path in folder.glob("*.jpg")) == sorted(NAMES)
    assert {path.suffix for path in folder.iterdir()} == {".json", ".jpg"}


@pytest.mark.parametrize("name", NAMES)
def test_file_is_what_the_recipe_makes(name: str) -> None:
    """After a change of a recipe run scripts/make_workflows.py."""
    assert workflow(name) == maker.build(name, recipes.RECIPES[name], recipes, VERSION)


@pytest.mark.parametrize("name", NAMES)
def test_widgets_show_the_recipe(name: str) -> None:
    recipe = recipes.RECIPES[name]
    assert values(name, "WanFitLoader") == [[recipe.model_high, recipe.model_low, "as stored"]]
    assert values(name, "WanFitOffloadPolicy")[0][:2] == [recipe.policy, recipe.vram_budget]
    assert values(name, "CreateVideo") == [[recipe.fps]]
    assert {row[0] for row in values(name, "LoraLoaderModelOnly")} == set(recipe.loras)
    size = [recipe.width, recipe.height, recipe.length, 1]
    latents = ("WanImageToVideo", "WanFirstLastFrameToVideo", "EmptyHunyuanLatentVideo", "Wan22ImageToVideoLatent")
    assert [row for kind in latents for row in values(name, kind)] == [size]
    given = [recipe.steps, recipe.cfg, recipe.cfg, recipe.sampler, "simple", recipe.shift]
    if recipe.experts:
        assert [row[2:8] for row in values(name, "WanFitSampler")] == [given]
        assert not values(name, "ModelSamplingSD3") + values(name, "KSampler")
    else:
        assert [row[2:4] for row in values(name, "KSampler")] == [given[:2]]
        assert values(name, "ModelSamplingSD3") == [[recipe.shift]]
    note = values(name, "MarkdownNote")[0][0]
    chinese = recipe.zh
    assert all(variation in note for variation in (*recipe.variations, *chinese.variations))
    for english, other in (
        (recipe.audience, chinese.audience),
        (recipe.needs, chinese.needs),
        (recipe.if_it_fails, chinese.if_it_fails),
    ):
        assert english in note and other in note
        assert sorted(re.findall(r"\d+", english)) == sorted(re.findall(r"\d+", other))
    assert len(recipe.variations) == len(chinese.variations)


@pytest.mark.parametrize("name", NAMES)
def test_links_are_whole_and_marked_with_their_pack(name: str) -> None:
    data = workflow(name)
    assert data["version"] == 0.4 and "definitions" not in data
    nodes = {node["id"]: node for node in data["nodes"]}
    for number, source, slot, target, target_slot, kind in data["links"]:
        assert number in nodes[source]["outputs"][slot]["links"]
        assert nodes[target]["inputs"][target_slot] == {
            **nodes[target]["inputs"][target_slot],
            "link": number,
            "type": kind,
        }
    for node in nodes.values():
        if node["type"] == "MarkdownNote":
            continue
        ours = node["type"].startswith("WanFit")
        assert node["properties"]["cnr_id"] == ("wanfit" if ours else "comfy-core")
        assert node["properties"]["ver"] == (VERSION if ours else "0.3.64")


@pytest.mark.parametrize("name", NAMES)
def test_files_are_named_with_their_address(name: str) -> None:
    recipe = recipes.RECIPES[name]
    used = {recipe.model_high, recipe.model_low, recipe.vae, recipes.TEXT_ENCODER, *recipe.loras} - {"none"}
    note = values(name, "MarkdownNote")[0][0]
    for file in used:
        address = recipes.DOWNLOADS[file]
        assert address.startswith("https://huggingface.co/") and address.endswith("/" + file)
        assert address in note
    listed = {m["name"] for node in workflow(name)["nodes"] for m in node["properties"].get("models", [])}
    assert listed == {file for file in used if not file.endswith(".gguf")}


@pytest.mark.parametrize("name", NAMES)
def test_what_a_recipe_needs_was_measured_or_is_called_an_estimate(name: str) -> None:
    needs = recipes.RECIPES[name].needs
    if needs.startswith("Estimate, not measured: "):
        return
    said = re.fullmatch(r"Measured: ([\d.]+) GiB of VRAM .*, (\d+) GiB of RAM\.", needs)
    assert said is not None
    files = (ROOT / "docs" / "measurements").glob("workflow_*.json")
    runs = [run for file in files for run in json.loads(file.read_text(encoding="utf-8"))["runs"]]
    rows = [row for run in runs for row in run["rows"] if (row["workflow"], row["way"]) == (name, "wanfit")]
    assert float(said[1]) == round(max(row["vram"] for row in rows), 1)
    assert int(said[2]) == round(max(row["ram"] for row in rows))
