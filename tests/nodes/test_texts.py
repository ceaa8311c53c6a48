"""Texts of the nodes: schema, locales, help pages. No ComfyUI."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "tests" / "comfyui" / "object_info.json").read_text(encoding="utf-8"))


def texts(language: str) -> dict[str, Any]:
    return json.loads((ROOT / "locales" / language / "nodeDefs.json").read_text(encoding="utf-8"))


def inputs_of(node: dict[str, Any]) -> dict[str, str]:
    groups = (node["input"].get(group, {}) for group in ("required", "optional"))
    return {name: spec[1]["tooltip"] for group in groups for name, spec in group.items()}


def test_english_locale_is_the_schema() -> None:
    english = texts("en")
    assert set(english) == set(SCHEMA)
    for name, node in SCHEMA.items():
        assert english[name]["display_name"] == node["display_name"]
        assert english[name]["description"] == node["description"]
        assert {key: value["tooltip"] for key, value in english[name]["inputs"].items()} == inputs_of(node)
        outputs = [english[name]["outputs"][str(i)]["tooltip"] for i in range(len(node["output"]))]
        assert outputs == node["output_tooltips"]


def test_chinese_locale_has_every_text() -> None:
    english, chinese = texts("en"), texts("zh")
    for name, node in english.items():
        other = chinese[name]
        assert set(other["inputs"]) == set(node["inputs"]) and set(other["outputs"]) == set(node["outputs"])
        entries = [
            other["description"],
            *(entry["tooltip"] for entry in (*other["inputs"].values(), *other["outputs"].values())),
        ]
        for text in entries:
            assert any("\u4e00" <= letter <= "\u9fff" for letter in text), (name, text)


@pytest.mark.parametrize("node", SCHEMA)
@pytest.mark.parametrize("page", ["{}.md", "{}/zh.md"])
def test_help_names_every_input_and_output(node: str, page: str) -> None:
    text = (ROOT / "web" / "docs" / page.format(node)).read_text(encoding="utf-8")
    for name in (*inputs_of(SCHEMA[node]), *SCHEMA[node]["output_name"]):
        assert f"**{name}**" in text, name
    for spec in (spec for group in SCHEMA[node]["input"].values() for spec in group.values()):
        for option in spec[1].get("options", []) if spec[0] == "COMBO" else []:
            if option != "sdpa":
                assert f"`{option}`" in text or option in ("default",), option


def test_the_policy_offers_the_attention_that_the_engine_knows() -> None:
    from wanfit.blocks import ATTENTION

    (_, widget) = SCHEMA["WanFitOffloadPolicy"]["input"]["required"]["attention"]
    assert widget["options"] == [*ATTENTION, "comfyui"]
