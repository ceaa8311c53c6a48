"""What the server lists and serves, against a stored copy that is the same for all cores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from comfyui_server import PACK, Server

STORED = Path(__file__).parent / "object_info.json"
FIELDS = (
    "input", "input_order", "output", "output_name", "output_tooltips", "name", "display_name", "description",
    "category", "output_node",
)  # fmt: skip
CORE_LISTS = ("sampler_name", "scheduler")
NODES = [
    "WanFitLoader", "WanFitTextEncoderLoader", "WanFitOffloadPolicy", "WanFitSampler", "WanFitVAEDecode",
    "WanFitDecodeToVideo", "WanFitPlan", "WanFitMemoryProbe", "WanFitPurge", "WanFitDoctor",
]  # fmt: skip


def contract(info: dict[str, Any]) -> dict[str, Any]:
    """The node's fields that both cores have; the lists of files and of the core's samplers are left out."""
    kept = json.loads(json.dumps({field: info.get(field) for field in FIELDS}))
    for group in kept["input"].values():
        for name, (kind, options) in ((name, spec) for name, spec in group.items() if len(spec) == 2):
            if kind == "COMBO":
                options["options"] = [o for o in options["options"] if "." not in o and name not in CORE_LISTS]
            options.pop("multiselect", None)
    return kept


def test_object_info_is_the_stored_one(server: Server) -> None:
    """Written anew with WANFIT_WRITE_OBJECT_INFO=1 (see docs); review the difference like code."""
    import os

    listed = server.get("/object_info")
    ours = {node: contract(listed[node]) for node in listed if node.startswith("WanFit")}
    assert sorted(ours) == sorted(NODES)
    if os.environ.get("WANFIT_WRITE_OBJECT_INFO"):
        STORED.write_text(json.dumps(ours, indent=1, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
    assert ours == json.loads(STORED.read_text(encoding="utf-8"))


def test_every_input_has_a_tooltip(server: Server) -> None:
    listed = server.get("/object_info")
    for node in NODES:
        groups = listed[node]["input"]
        for name, spec in {**groups.get("required", {}), **groups.get("optional", {})}.items():
            assert len(spec[1].get("tooltip", "")) > 20, (node, name)


def test_nothing_failed_to_import(server: Server) -> None:
    assert "IMPORT FAILED" not in server.log
    assert "Cannot import" not in server.log
    assert "Error while calling comfy_entrypoint" not in server.log


def test_workflows_help_and_locales_are_served(server: Server) -> None:
    names = sorted(path.stem for path in (PACK / "workflows").glob("*.json"))
    assert sorted(server.get("/workflow_templates")["wanfit"]) == names
    for node in NODES:
        for page in (f"{node}.md", f"{node}/zh.md"):
            text = server.get(f"/extensions/wanfit/docs/{page}").decode()
            assert len(text) > 200, page
    texts = server.get("/i18n")
    for language in ("en", "zh"):
        assert set(NODES) <= set(texts[language]["nodeDefs"]), language


@pytest.mark.parametrize("kind", ["diffusion_models", "text_encoders"])
def test_gguf_files_have_keys_of_their_own(server: Server, kind: str) -> None:
    assert any(name.endswith(".gguf") for name in server.get(f"/models/wanfit_{kind}_gguf"))
    assert not any(name.endswith(".gguf") for name in server.get(f"/models/{kind}"))
