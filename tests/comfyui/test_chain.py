"""ComfyUI's own nodes around the engine-backed MODEL: the same result as around the core's own."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import websocket
from comfy_graphs import Graph, core_model, wanfit_model
from comfy_names import HIGH, T2V_HIGH, TI2V, VAE, VAE_22, relative_error
from comfyui_server import PromptFailed, Server
from PIL import Image

PARITY = 1e-4
CFG_NODES = ["RescaleCFG", "CFGNorm", "CFGZeroStar", "TCFG", "APG", "Mahiro", "SkipLayerGuidanceDiT"]
SIZE = {"width": 64, "height": 48, "length": 9, "batch_size": 1}


def sample(
    graph: Graph, name: str, model: list[Any], positive: Any, negative: Any, latent: Any, **changes: Any
) -> None:
    settings = {"seed": 1, "steps": 2, "cfg": 3.5, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0}
    result = graph.add(
        "KSampler", model=model, positive=positive, negative=negative, latent_image=latent, **{**settings, **changes}
    )
    graph.add("TestSaveTensor", latent=result, name=name)


def texts(graph: Graph) -> list[list[Any]]:
    return [graph.add("TestConditioning", seed=seed) for seed in (1, 2)]


def both(run: Any, build: Callable[[Graph, Callable[..., list[Any]], str], None]) -> float:
    """`build(graph, loader, name)` around both kinds of MODEL in one prompt: the relative error."""
    graph = Graph()
    build(graph, core_model, "core")
    build(graph, wanfit_model, "wanfit")
    results = run(graph)
    return relative_error(results["wanfit"], results["core"])


@pytest.mark.parametrize("node", CFG_NODES)
def test_cfg_variants(run: Any, server: Server, node: str) -> None:
    inputs = server.get(f"/object_info/{node}")[node]["input"]["required"]
    values = {name: spec[1]["default"] for name, spec in inputs.items() if len(spec) > 1 and "default" in spec[1]}
    if node == "SkipLayerGuidanceDiT":  # it replaces whole blocks
        values |= {"double_layers": "1", "single_layers": "", "start_percent": 0.0, "end_percent": 1.0}

    def build(graph: Graph, loader: Callable[..., list[Any]], name: str) -> None:
        model = loader(graph, T2V_HIGH)
        empty = graph.add("EmptyHunyuanLatentVideo", **SIZE)
        sample(graph, name, graph.add(node, model=model, **values), *texts(graph), empty)
        if name == "core":
            sample(graph, "plain", model, *texts(graph), empty)

    assert both(run, build) < PARITY
    saved = {name: np.load(server.base / "output" / f"{name}.npy") for name in ("core", "plain")}
    assert relative_error(saved["core"], saved["plain"]) > 1e-3  # the node does something


@pytest.mark.parametrize(
    ("node", "images"),
    [
        ("WanImageToVideo", ("start_image",)),
        ("WanFirstLastFrameToVideo", ("start_image", "end_image")),
        ("WanFirstLastFrameToVideo", ("end_image",)),
    ],
)
def test_images_for_the_14b_model(run: Any, node: str, images: tuple[str, ...]) -> None:
    def build(graph: Graph, loader: Callable[..., list[Any]], name: str) -> None:
        vae = graph.add("VAELoader", vae_name=VAE)
        positive, negative = texts(graph)
        given = {
            image: graph.add("EmptyImage", width=32, height=32, batch_size=1, color=0x4080C0 + 0x30 * number)
            for number, image in enumerate(images)
        }
        size = {"width": 32, "height": 32, "length": 5, "batch_size": 1}
        made = graph.add(node, positive=positive, negative=negative, vae=vae, **size, **given)
        sample(graph, name, loader(graph, HIGH), made, [made[0], 1], [made[0], 2])

    assert both(run, build) < PARITY


def test_image_latent_of_the_5b_model(run: Any, server: Server, large_vae: Path) -> None:
    """The first frame is kept by a noise mask: its tokens have another timestep than the rest."""

    def build(graph: Graph, loader: Callable[..., list[Any]], name: str) -> None:
        vae = graph.add("VAELoader", vae_name=VAE_22)
        image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0x4080C0)
        size = {"width": 64, "height": 64, "length": 9, "batch_size": 1}
        made = graph.add("Wan22ImageToVideoLatent", vae=vae, start_image=image, **size)
        sample(graph, name, loader(graph, TI2V), *texts(graph), made)

    assert both(run, build) < PARITY


def test_an_image_encoded_by_the_other_vae(server: Server, large_vae: Path) -> None:
    graph = Graph()
    positive, negative = texts(graph)
    image = graph.add("EmptyImage", width=64, height=64, batch_size=1, color=0)
    made = graph.add(
        "WanImageToVideo", positive=positive, negative=negative, vae=graph.add("VAELoader", vae_name=VAE_22),
        start_image=image, width=64, height=64, length=1, batch_size=1,
    )  # fmt: skip
    empty = graph.add("EmptyHunyuanLatentVideo", width=64, height=64, length=1, batch_size=1)
    sample(graph, "x", wanfit_model(graph, HIGH), made, [made[0], 1], empty, steps=1)
    with pytest.raises(PromptFailed, match="pair_mismatch") as caught:
        server.run(graph.prompt)
    assert "positive" in str(caught.value) and "wan_2.1_vae" in str(caught.value)


def test_samplers_show_latent_previews(server: Server) -> None:
    """latent2rgb: a picture for each step but the last few that the front end's throttle may take."""
    graph = Graph()
    sample(
        graph, "previews", wanfit_model(graph, HIGH), *texts(graph), graph.add("EmptyHunyuanLatentVideo", **SIZE),
        seed=12, steps=6,
    )  # fmt: skip
    client = "wanfit-previews"
    socket = websocket.create_connection(f"{server.address.replace('http', 'ws')}/ws?clientId={client}", timeout=60)
    pictures: list[Image.Image] = []
    prompt_id = server.queue(graph.prompt, client)
    while True:
        message = socket.recv()
        if isinstance(message, bytes):
            kind, _ = struct.unpack(">II", message[:8])
            assert kind == 1  # PREVIEW_IMAGE
            pictures.append(Image.open(io.BytesIO(message[8:])).convert("RGB"))
        elif json.loads(message)["type"] in ("execution_success", "execution_error", "execution_interrupted"):
            break
    socket.close()
    assert server.wait(prompt_id)["status"]["status_str"] == "success"
    assert len(pictures) >= 2
    assert all(max(picture.size) >= 48 for picture in pictures)
    assert max(high - low for low, high in pictures[-1].getextrema()) > 20  # noise, not a plain colour
