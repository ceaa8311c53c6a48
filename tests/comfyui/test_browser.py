"""The shipped workflows in the real front end: nothing red, the recipe's values, a run, the probe's chart."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from comfy_names import tiny_name
from comfy_workflow import load, to_prompt, widgets_of
from comfyui_server import PACK, Server

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright and a Chromium")

WORKFLOWS = sorted((PACK / "workflows").glob("*.json"))
SHOTS = Path(os.environ.get("WANFIT_SCREENSHOTS", PACK / "demo" / "screenshots"))
# What a node of the graph shows; a type that the front end does not know has no constructor in LiteGraph.
NODES = """() => window.app.graph._nodes.map(n => ({
    id: n.id, type: n.type, known: n.type in window.LiteGraph.registered_node_types || n.type === 'MarkdownNote',
    red: Boolean(n.has_errors), widgets: Object.fromEntries((n.widgets ?? []).map(w => [w.name, w.value])),
    images: (n.imgs ?? []).length }))"""


@pytest.fixture(scope="module")
def named_files(server: Server) -> None:
    """Every file that a workflow names exists: the front end marks a loader red whose file is not in the list."""
    for path in WORKFLOWS:
        for node in load(path)["nodes"]:
            for value in node["widgets_values"]:
                name = str(value)
                if not name.endswith((".safetensors", ".gguf")):
                    continue
                source = next((server.base / "models").rglob(tiny_name(name)), None)
                folder = {"umt5": "text_encoders"}.get(name[:4], source.parent.name if source else "vae")
                target = server.base / "models" / folder / name
                if not target.exists():
                    target.touch() if source is None else os.link(source, target)


@pytest.fixture(scope="module")
def page(server: Server, named_files: None) -> Iterator[Any]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on the path")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        opened = browser.new_page(viewport={"width": 2720, "height": 1400})
        opened.goto(server.address)
        opened.wait_for_function("() => window.app?.graph?._nodes !== undefined && !!window.LiteGraph", timeout=60_000)
        opened.wait_for_timeout(2000)
        opened.keyboard.press("Escape")
        yield opened
        browser.close()


def show(page: Any, workflow: dict[str, Any]) -> list[dict[str, Any]]:
    page.evaluate("workflow => window.app.loadGraphData(workflow)", workflow)
    page.wait_for_timeout(800)
    for _ in range(3):  # the dialog about missing files: the tiny models have other names
        page.keyboard.press("Escape")
    page.evaluate("() => window.app.canvas?.fitViewToSelectionAnimated?.()")
    page.evaluate(
        """() => { const ds = window.app.canvas.ds; ds.scale = 0.72; ds.offset = [640, 150];
                   window.app.canvas.setDirty(true, true) }"""
    )
    page.wait_for_timeout(500)
    return page.evaluate(NODES)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_opens_without_red_nodes_and_with_the_recipe(page: Any, server: Server, path: Path) -> None:
    SHOTS.mkdir(parents=True, exist_ok=True)
    workflow = load(path)
    nodes = show(page, workflow)
    page.screenshot(path=str(SHOTS / f"{path.stem}-{server.tree.version}.png"))
    assert len(nodes) == len(workflow["nodes"])
    assert all(node["known"] for node in nodes), [node["type"] for node in nodes if not node["known"]]
    assert not any(node["red"] for node in nodes)
    prompt = to_prompt(workflow, server.get("/object_info"))
    shown = {str(node["id"]): node for node in nodes}
    for node in workflow["nodes"]:
        if node["type"].startswith("WanFit"):
            expected = widgets_of(prompt, node["id"])
            actual = {name: shown[str(node["id"])]["widgets"][name] for name in expected}
            assert actual == expected, node["type"]


def test_run_shows_the_probes_chart(page: Any, server: Server) -> None:
    workflow = load(PACK / "workflows" / "wan22_t2v_16gb.json")
    for node in workflow["nodes"]:
        if node["type"] == "MarkdownNote":
            continue
        values = node["widgets_values"]
        node["widgets_values"] = [tiny_name(v) if str(v).endswith((".safetensors", ".gguf")) else v for v in values]
        if node["type"] == "EmptyHunyuanLatentVideo":
            node["widgets_values"] = [64, 64, 5, 1]
        if node["type"] == "WanFitSampler":
            node["widgets_values"][2] = 2
    show(page, workflow)
    page.set_viewport_size({"width": 640, "height": 360})  # drawn in software, on the cores that the run needs
    page.evaluate("() => window.app.queuePrompt(0)")
    probe = next(node["id"] for node in workflow["nodes"] if node["type"] == "WanFitMemoryProbe")
    page.wait_for_function("id => (window.app.nodeOutputs?.[id]?.images ?? []).length > 0", arg=probe, timeout=300_000)
    page.set_viewport_size({"width": 1600, "height": 900})
    page.evaluate(
        """() => { const ds = window.app.canvas.ds; ds.scale = 0.8; ds.offset = [-1550, -200];
                   window.app.canvas.setDirty(true, true) }"""
    )
    # the front end fetches the picture when the node is drawn
    page.wait_for_function("id => (window.app.graph.getNodeById(id)?.imgs ?? []).length > 0", arg=probe, timeout=60_000)
    page.wait_for_timeout(1000)
    page.screenshot(path=str(SHOTS / f"probe-{server.tree.version}.png"))
    assert not any(node["red"] for node in page.evaluate(NODES))
