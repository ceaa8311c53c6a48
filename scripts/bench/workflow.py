"""Shipped workflows at real size on a real ComfyUI server, on a card of N GiB: seconds, VRAM, RAM; and the same with
ComfyUI's own nodes.

    python scripts/dev.py bench workflow --comfy TREE --models DIR --workflows wan22_i2v_16gb --free-gib 16
    python scripts/dev.py bench workflow ... --ways wanfit core --gguf-nodes TREE_OF_COMFYUI_GGUF

Writes to DIR the files that the workflows name, unless they are there, with random values: both experts are one file
under two names. Each way has a server of its own and runs the workflow `--runs` times, each with another seed. A second
process holds all device memory but N GiB. Prints a table and writes JSON to docs/measurements/.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import full_size_files as files
import torch
from dit import GIB, MEASUREMENTS, only_free
from dit_comfy import Watch, used_vram
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "support")]
from comfy_workflow import load, to_prompt  # noqa: E402
from comfyui_server import PromptFailed, Server, Tree, prepare_base, python_for  # noqa: E402

Prompt = dict[str, dict[str, Any]]
TEXT_ROWS = 256384


class ServerWatch(Watch):
    """And the most RAM of one process: its own and pinned, without pages of files, which the system can take back."""

    def __init__(self, pid: int, before: int) -> None:
        super().__init__(before)
        self._status, self.ram = Path(f"/proc/{pid}/status"), 0

    def look(self) -> None:
        super().look()
        lines = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        resident = sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024
        self.ram = max(self.ram, resident)


def workflow_path(name: str) -> Path:
    return ROOT / "workflows" / f"{name}.json"


def write_files(workflow: dict[str, Any], models: Path) -> None:
    """What the workflow says that it needs, and is not there."""
    for node in workflow["nodes"]:
        listed = [(model["directory"], model["name"]) for model in node["properties"].get("models", ())]
        if node["type"] == "WanFitLoader":  # GGUF files are not listed: ComfyUI downloads none
            listed += [("diffusion_models", name) for name in node["widgets_values"][:2] if name != "none"]
        for directory, name in listed:
            path = models / directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                write_file(path, directory)


def write_file(path: Path, folder: str) -> None:
    kind = next((kind for kind in files.CHANNELS if kind in path.name.lower()), None)
    if folder == "vae":
        files.write_vae(path)
    elif folder == "text_encoders":
        files.write_text_encoder(path, rows=TEXT_ROWS)
    elif kind is None:
        raise SystemExit(f"{path.name}: only files of I2V-A14B and T2V-A14B are written here")
    else:
        other = path.with_name(path.name.replace("low", "high").replace("Low", "High"))
        if other.exists():
            os.link(other, path)
        elif folder == "loras":
            files.write_rank_64(path, kind)
        else:
            files.write_expert(path, kind)


def shortened(prompt: Prompt, steps: int | None) -> Prompt:
    if steps is not None:
        for node in prompt.values():
            if node["class_type"] == "WanFitSampler":
                node["inputs"]["steps"] = steps
    return prompt


def with_core_nodes(prompt: Prompt, split: int) -> Prompt:
    """The same graph as ComfyUI's own templates build it: its loaders, two KSamplerAdvanced, VAEDecode, no policy.

    Args:
        split: the step at which the low expert takes over; WanFit's sampler finds it by itself.
    """
    prompt = copy.deepcopy(prompt)
    taken: dict[tuple[str, int], list[Any]] = {}
    for key, node in list(prompt.items()):
        given = node["inputs"]
        match node["class_type"]:
            case "WanFitLoader":
                for output, side in enumerate(("high", "low")):
                    prompt[f"{key}{side}"] = core_loader(given[f"model_{side}"])
                    taken[key, output] = [f"{key}{side}", 0]
            case "WanFitTextEncoderLoader":
                name = given["text_encoder"]
                prompt[f"{key}clip"] = _node("CLIPLoader", clip_name=name, type="wan", device="default")
                taken[key, 0] = [f"{key}clip", 0]
            case "WanFitOffloadPolicy":
                taken[key, 0], taken[key, 1] = given["model"], given["model_low"]
            case "WanFitMemoryProbe":
                taken[key, 0] = given["anything"]
            case "WanFitVAEDecode":
                prompt[key] = _node("VAEDecode", samples=given["samples"], vae=given["vae"])
                continue
            case "WanFitSampler":
                prompt |= core_sampler(key, given, split)
                taken[key, 0] = [f"{key}second", 0]
            case _:
                continue
        del prompt[key]
    for node in prompt.values():
        for name, value in node["inputs"].items():
            while isinstance(value, list) and (value[0], value[1]) in taken:
                value = taken[value[0], value[1]]
            node["inputs"][name] = value
    return prompt


def core_loader(name: str) -> dict[str, Any]:
    if name.endswith(".gguf"):
        return _node("UnetLoaderGGUF", unet_name=name)
    return _node("UNETLoader", unet_name=name, weight_dtype="default")


def core_sampler(key: str, given: dict[str, Any], split: int) -> Prompt:
    """Two KSamplerAdvanced behind ModelSamplingSD3."""
    same = {name: given[name] for name in ("positive", "negative", "steps", "sampler_name", "scheduler")}
    nodes: Prompt = {}
    for place, side in (("first", "high"), ("second", "low")):
        nodes[f"{key}{side}"] = _node("ModelSamplingSD3", model=given[f"model_{side}"], shift=given["shift"])
        first = place == "first"
        nodes[f"{key}{place}"] = _node(
            "KSamplerAdvanced", **same, model=[f"{key}{side}", 0], cfg=given[f"cfg_{side}"], noise_seed=given["seed"],
            add_noise="enable" if first else "disable", return_with_leftover_noise="enable" if first else "disable",
            start_at_step=0 if first else split, end_at_step=split if first else 10000,
            latent_image=given["latent_image"] if first else [f"{key}first", 0],
        )  # fmt: skip
    return nodes


def _node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


@contextmanager
def serving(options: argparse.Namespace, packs: dict[str, Path]) -> Iterator[Server]:
    tree = Tree(options.comfy, python_for(options.comfy))
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        prepare_base(base, packs)
        (base / "models").rename(base / "none")
        (base / "models").symlink_to(options.models.resolve(), target_is_directory=True)
        Image.effect_noise((832, 480), 60).convert("RGB").save(base / "input" / "example.png")
        with Server(tree, base, options.server) as server:
            yield server


def run_way(options: argparse.Namespace, name: str, way: str) -> Iterator[dict[str, Any]]:
    packs = {"wanfit": ROOT} | ({"ComfyUI-GGUF": options.gguf_nodes.resolve()} if options.gguf_nodes else {})
    before = used_vram()
    with serving(options, packs) as server:
        prompt = to_prompt(load(workflow_path(name)), server.get("/object_info"))
        prompt = shortened(prompt, options.steps)
        if way == "core":
            prompt = with_core_nodes(prompt, options.split)
        for run in range(1, options.runs + 1):
            for node in prompt.values():
                node["inputs"] |= {key: run for key in ("seed", "noise_seed") if key in node["inputs"]}
            watch = ServerWatch(server.pid, before)
            watch.start()
            row: dict[str, Any] = {"workflow": name, "way": way, "run": run}
            begin = time.perf_counter()
            try:
                entry = server.run(prompt, options.limit)
                row["text"] = [text for out in entry["outputs"].values() for text in out.get("text", [])]
            except (PromptFailed, TimeoutError) as error:
                row["failure"] = str(error)[:400]
            row["seconds"] = time.perf_counter() - begin
            yield row | {"vram": watch.end(), "ram": watch.ram / GIB}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--comfy", type=Path, required=True, help="a ComfyUI source tree")
    parser.add_argument("--gguf-nodes", type=Path, help="a tree of ComfyUI-GGUF, for core's way with GGUF files")
    parser.add_argument("--models", type=Path, required=True, help="folder for the model files")
    parser.add_argument("--workflows", nargs="+", default=["wan22_i2v_16gb"])
    parser.add_argument("--ways", nargs="+", choices=["wanfit", "core"], default=["wanfit"])
    parser.add_argument("--free-gib", type=float, help="device memory that a second process leaves free")
    parser.add_argument("--steps", type=int, help="instead of the workflow's")
    parser.add_argument("--split", type=int, default=2, help="of core's way: first step of the low expert")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one run")
    parser.add_argument("--server", nargs="*", default=[], help="options of ComfyUI, without their dashes: lowvram")
    parser.add_argument("--out", type=Path, help="JSON; default: docs/measurements/workflow-<time>.json")
    options = parser.parse_args()
    options.server = [f"--{option}" for option in options.server]
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    torch.cuda.init()
    rows: list[dict[str, Any]] = []
    for name in options.workflows:
        begin = time.perf_counter()
        write_files(load(workflow_path(name)), options.models)
        print(f"files of {name} written in {time.perf_counter() - begin:.0f} s", flush=True)
    with only_free(options.free_gib):
        for name in options.workflows:
            for way in options.ways:
                for row in run_way(options, name, way):
                    rows.append(row)
                    shown = {key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()}
                    print(*(f"{key} {value}" for key, value in shown.items() if key != "text"), sep=", ", flush=True)
    now = datetime.now(timezone.utc)
    out = options.out or MEASUREMENTS / f"workflow-{now:%Y%m%d-%H%M%S}.json"
    record = {
        "when": now.isoformat(timespec="seconds"),
        "command": sys.argv[1:],
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "free_gib": options.free_gib,
        "rows": rows,
    }
    out.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
