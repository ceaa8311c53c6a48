"""The two decode nodes: pixels against core's VAEDecode, the video in core's SaveVideo, cancel, bad input."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from comfy_graphs import Graph
from comfy_names import VAE
from comfyui_server import PromptFailed, Server


def latent(graph: Graph, **changes: int) -> list[Any]:
    sizes = {"batch": 1, "channels": 16, "frames": 2, "height": 6, "width": 20, "seed": 5}
    return graph.add("TestLatent", **{**sizes, **changes})


def to_video(graph: Graph, source: list[Any], **inputs: Any) -> list[Any]:
    vae = graph.add("VAELoader", vae_name=VAE)
    return graph.add(
        "WanFitDecodeToVideo", **{"samples": source, "vae": vae, "fps": 16.0, "vram_budget": 0.0, **inputs}
    )


def save(graph: Graph, video: list[Any], name: str) -> None:
    graph.add("SaveVideo", video=video, filename_prefix=name, format="auto", codec="auto")


def saved(server: Server, name: str) -> Path:
    (found,) = (server.base / "output").glob(f"{name}_*.mp4")
    return found


def left_behind(server: Server) -> list[str]:
    """Videos, whole or not, and files of waiting frames."""
    names = (path.name for path in (server.base / "temp").iterdir())
    return sorted(name for name in names if "wanfit" in name)


@pytest.fixture
def no_old_files(server: Server) -> Iterator[None]:
    for name in left_behind(server):
        (server.base / "temp" / name).unlink()
    yield


def refused(server: Server, graph: Graph) -> str:
    with pytest.raises(PromptFailed) as caught:
        server.run(graph.prompt)
    return str(caught.value)


@pytest.mark.parametrize("tile_size", [0, 128, 150])
def test_decode_equals_core(run: Any, tile_size: int) -> None:
    """float32, 1e-5 on a range of 1. A tile size is a bound: it need not divide the picture, nor be a multiple."""
    graph = Graph()
    source, vae = latent(graph), graph.add("VAELoader", vae_name=VAE)
    graph.add("TestSaveTensor", image=graph.add("VAEDecode", samples=source, vae=vae), name="core_image")
    ours = graph.add("WanFitVAEDecode", samples=source, vae=vae, tile_size=tile_size)
    graph.add("TestSaveTensor", image=ours, name="wanfit_image")
    results = run(graph)
    expected, actual = results["core_image"], results["wanfit_image"]
    assert actual.shape == expected.shape and np.ptp(expected) > 0.1
    assert np.abs(actual - expected).max() <= 1e-5


@pytest.mark.usefixtures("no_old_files")
def test_video_holds_the_frames_that_core_decodes(run: Any, server: Server) -> None:
    """SaveVideo copies the stream. CRF 17, chroma at half size: a few levels of 255 on noise, on average."""
    graph = Graph()
    source = latent(graph, batch=2, width=8)
    vae = graph.add("VAELoader", vae_name=VAE)
    graph.add("TestSaveTensor", image=graph.add("VAEDecode", samples=source, vae=vae), name="core_frames")
    save(graph, to_video(graph, source, fps=23.976), "frames")
    expected = run(graph)["core_frames"]
    with av.open(str(saved(server, "frames"))) as container:
        stream = container.streams.video[0]
        assert abs(float(stream.average_rate) - 23.976) < 1e-3 and not container.streams.audio
        frames = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(stream)])
    assert frames.shape == expected.shape
    luma = np.array([0.2126, 0.7152, 0.0722])
    assert np.abs((frames / 255 - expected) @ luma).mean() < 4 / 255
    assert len(left_behind(server)) == 1


def test_sound_is_cut_where_the_frames_end(run: Any, server: Server) -> None:
    graph = Graph()
    audio = graph.add("EmptyAudio", duration=10.0, sample_rate=44100, channels=2)
    save(graph, to_video(graph, latent(graph, width=8), audio=audio), "sound")
    run(graph)
    with av.open(str(saved(server, "sound"))) as container:
        assert container.streams.audio[0].codec_context.name == "aac"
        assert container.duration / av.time_base == pytest.approx(5 / 16, abs=0.06)


@pytest.mark.usefixtures("no_old_files")
def test_cancel_leaves_no_file(run: Any, server: Server) -> None:
    graph = Graph()
    save(graph, to_video(graph, latent(graph, frames=60)), "cancelled")
    started = server.queue(graph.prompt)
    deadline = time.monotonic() + 60
    while not any(name.endswith(".part.mp4") for name in left_behind(server)):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    server.interrupt()
    entry = server.wait(started, 60)
    assert any(kind == "execution_interrupted" for kind, _ in entry["status"]["messages"])
    assert left_behind(server) == []
    again = Graph()
    save(again, to_video(again, latent(again, width=8)), "after")
    run(again)
    assert len(left_behind(server)) == 1


def test_the_floor_is_said_in_gib_with_the_size(server: Server) -> None:
    graph = Graph()
    save(graph, to_video(graph, latent(graph), vram_budget=0.001), "x")
    text = refused(server, graph)
    assert "budget_exceeded" in text and "vram_budget" in text and "GiB to decode 160x48" in text


@pytest.mark.parametrize(("channels", "frames"), [(48, 3), (16, 0)])
def test_a_latent_that_does_not_fit_the_vae(server: Server, channels: int, frames: int) -> None:
    graph = Graph()
    save(graph, to_video(graph, latent(graph, channels=channels, frames=frames)), "x")
    text = refused(server, graph)
    assert "latent_invalid" in text and "samples" in text


@pytest.mark.usefixtures("no_old_files")
def test_a_latent_with_nan(server: Server) -> None:
    graph = Graph()
    broken = graph.add("LatentMultiply", samples=latent(graph), multiplier=float("nan"))
    save(graph, to_video(graph, broken), "x")
    text = refused(server, graph)
    assert "latent_invalid" in text and "NaN" in text
    assert left_behind(server) == []


def test_a_tile_smaller_than_the_smallest(server: Server) -> None:
    graph = Graph()
    vae = graph.add("VAELoader", vae_name=VAE)
    image = graph.add("WanFitVAEDecode", samples=latent(graph), vae=vae, tile_size=64)
    graph.add("TestSaveTensor", image=image, name="x")
    text = refused(server, graph)
    assert "tile_invalid" in text and "tile_size" in text and "128" in text


@pytest.mark.skipif(sys.platform != "linux", reason="a small file system can only be mounted on Linux")
def test_a_full_disk(server: Server) -> None:
    """The temp folder on a file system of 16 KiB."""
    temp = server.base / "temp"
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(temp)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs root")
    try:
        graph = Graph()
        save(graph, to_video(graph, latent(graph)), "x")
        text = refused(server, graph)
        assert "output_unwritable" in text and "MiB free" in text and "--temp-directory" in text
        assert left_behind(server) == []
    finally:
        subprocess.run(["umount", str(temp)], check=True)
