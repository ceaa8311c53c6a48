"""Prompts in API format for the server tests."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comfyui_server import Server

Prompt = dict[str, dict[str, Any]]


class Graph:
    """Collects nodes: `graph.add("VAELoader", vae_name="x")` returns a link to its first output."""

    def __init__(self) -> None:
        self.prompt: Prompt = {}

    def add(self, node_class: str, **inputs: Any) -> list[Any]:
        node_id = str(len(self.prompt) + 1)
        self.prompt[node_id] = {"class_type": node_class, "inputs": inputs}
        return [node_id, 0]

    def sample(
        self,
        model: list[Any],
        name: str,
        *,
        seed: int = 7,
        steps: int = 4,
        cfg: float = 3.5,
        tokens: int = 16,
        **latent: int,
    ) -> str:
        """KSampler euler/simple from an empty latent; the result is written as `name`. Returns the sampler's id.

        Args:
            tokens: of text.
            latent: inputs of EmptyHunyuanLatentVideo.
        """
        size = {"width": 80, "height": 64, "length": 9, "batch_size": 1, **latent}
        positive, negative = (self.add("TestConditioning", seed=seed, tokens=tokens) for seed in (1, 2))
        result = self.add(
            "KSampler", model=model, positive=positive, negative=negative, seed=seed, steps=steps, cfg=cfg,
            sampler_name="euler", scheduler="simple", denoise=1.0,
            latent_image=self.add("EmptyHunyuanLatentVideo", **size),
        )  # fmt: skip
        self.add("TestSaveTensor", latent=result, name=name)
        return str(result[0])


def core_model(graph: Graph, name: str) -> list[Any]:
    return graph.add("UNETLoader", unet_name=name, weight_dtype="default")


def wanfit_model(graph: Graph, high: str, low: str = "none", dtype: str = "as stored") -> list[Any]:
    return graph.add("WanFitLoader", model_high=high, model_low=low, weight_dtype=dtype)


def watched(
    graph: Graph, model: list[Any], name: str, event: str, *, block: int, forward: int, times: int
) -> list[Any]:
    """The MODEL with a log of its blocks in output/<name>.txt, and `event` that many times from that block on."""
    return graph.add("TestWatchBlocks", model=model, name=name, event=event, block=block, forward=forward, times=times)


def broken_off(server: Server, graph: Graph, after: int) -> None:
    """Queue the graph and interrupt it when that many checkpoints are there."""
    folder = server.base / "output" / "wanfit_checkpoints"
    shutil.rmtree(folder, ignore_errors=True)
    queued = server.queue(graph.prompt)
    limit = time.monotonic() + 120
    while len(list(folder.glob("*/*.safetensors"))) < after and time.monotonic() < limit:
        time.sleep(0.005)
    server.interrupt()
    entry = server.wait(queued, 60)
    assert any(kind == "execution_interrupted" for kind, _ in entry["status"]["messages"]), "it ran to its end"
