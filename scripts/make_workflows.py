"""Writes workflows/*.json (UI format 0.4) and their thumbnails from nodes/recipes.py.

python scripts/make_workflows.py
"""

from __future__ import annotations

import importlib.util
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import tomllib
from PIL import Image, ImageDraw, ImageFont

ROOT = Path(__file__).resolve().parent.parent
CORE = "0.3.64"
NEGATIVE = (
    "色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，"
    "多余的手指，画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走"
)
POSITIVE = {
    "i2v": "The camera moves slowly towards the subject, soft daylight, natural motion.",
    "flf2v": "The camera glides from the first view to the last in one smooth take, natural motion.",
    "t2v": "A red fox walks through fresh snow at sunrise, its breath visible, shallow depth of field.",
    "ti2v": "Waves roll onto a pebble beach at dusk, warm light, slow camera movement to the left.",
}


def load_recipes() -> Any:
    spec = importlib.util.spec_from_file_location("wanfit_recipes", ROOT / "nodes" / "recipes.py")
    if spec is None or spec.loader is None:
        raise RuntimeError("nodes/recipes.py cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Canvas:
    """Collects nodes and links of one workflow. A link is (node id, slot, type)."""

    def __init__(self, name: str, version: str, downloads: dict[str, str]) -> None:
        self.nodes: list[dict[str, Any]] = []
        self.links: list[list[Any]] = []
        self._name, self._version, self._downloads = name, version, downloads

    def add(
        self,
        kind: str,
        position: tuple[int, int],
        widgets: list[Any],
        inputs: dict[str, Any] | None = None,
        outputs: tuple[tuple[str, str], ...] = (),
        *,
        optional: tuple[str, ...] = (),
        size: tuple[int, int] = (320, 130),
        title: str = "",
        models: tuple[tuple[str, str], ...] = (),
    ) -> list[tuple[int, int, str]]:
        """One node; `inputs` maps names to links, or to a type for an open input. Returns a link for each output."""
        number = len(self.nodes) + 1
        slots = []
        for slot, (name, link) in enumerate((inputs or {}).items()):
            entry: dict[str, Any] = {"name": name, "type": link if isinstance(link, str) else link[2], "link": None}
            if name in optional:
                entry["shape"] = 7
            if not isinstance(link, str):
                link_type = entry["type"] = link[2]
                entry["link"] = len(self.links) + 1
                self.links.append([entry["link"], link[0], link[1], number, slot, link_type])
                source = self.nodes[link[0] - 1]["outputs"][link[1]]
                source["links"] = [*(source["links"] or []), entry["link"]]
            slots.append(entry)
        ours = kind.startswith("WanFit")
        properties: dict[str, Any] = {"Node name for S&R": kind}
        if kind != "MarkdownNote":
            properties |= {"cnr_id": "wanfit" if ours else "comfy-core", "ver": self._version if ours else CORE}
        if models:
            properties["models"] = [
                {"name": file, "url": self._downloads[file], "directory": folder} for file, folder in models
            ]
        node = {
            "id": number, "type": kind, "pos": list(position), "size": list(size), "flags": {}, "order": number - 1,
            "mode": 0, "inputs": slots,
            "outputs": [{"name": n, "type": t, "links": None, "slot_index": i} for i, (n, t) in enumerate(outputs)],
            "properties": properties, "widgets_values": widgets,
        }  # fmt: skip
        if title:
            node["title"] = title
        self.nodes.append(node)
        return [(number, slot, kind_) for slot, (_, kind_) in enumerate(outputs)]

    def to_json(self) -> dict[str, Any]:
        return {
            "id": str(uuid.uuid5(uuid.NAMESPACE_URL, f"wanfit/{self._name}")), "revision": 0,
            "last_node_id": len(self.nodes), "last_link_id": len(self.links), "nodes": self.nodes,
            "links": self.links, "groups": [], "config": {}, "extra": {"ds": {"scale": 0.7, "offset": [0, 0]}},
            "version": 0.4,
        }  # fmt: skip


def build(name: str, recipe: Any, recipes: Any, version: str) -> dict[str, Any]:
    canvas = Canvas(name, version, dict(recipes.DOWNLOADS))
    note = (
        f"## {recipe.title}\n\n**For whom.** {recipe.audience}\n\n**What it will need.** {recipe.needs}\n\n"
        f"**If it fails.** {recipe.if_it_fails}\n\n"
    )
    if recipe.variations:
        note += "**Also**\n\n" + "".join(f"- {variation}\n" for variation in recipe.variations) + "\n"
    zh = recipe.zh
    note += f"## {zh.title}\n\n**适用** {zh.audience}\n\n**需要** {zh.needs}\n\n**如果失败** {zh.if_it_fails}\n\n"
    if zh.variations:
        note += "**其他用法**\n\n" + "".join(f"- {variation}\n" for variation in zh.variations) + "\n"
    note += "**Files / 文件**\n\n"
    files = [(f, "diffusion_models") for f in (recipe.model_high, recipe.model_low) if f != "none"]
    files += [(recipes.TEXT_ENCODER, "text_encoders"), (recipe.vae, "vae"), *((f, "loras") for f in recipe.loras)]
    note += "\n".join(f"- [{file}]({recipes.DOWNLOADS[file]}) in `models/{folder}`" for file, folder in files)
    canvas.add("MarkdownNote", (-520, 0), [note], size=(480, 580), title="Read me / 说明")

    gguf = recipe.model_high.endswith(".gguf")  # the front end offers downloads of safetensors only
    high, low, _ = canvas.add(
        "WanFitLoader", (0, 0), [recipe.model_high, recipe.model_low, "as stored"], None,
        (("model_high", "MODEL"), ("model_low", "MODEL"), ("info", "STRING")), size=(420, 150),
        models=() if gguf else tuple(f for f in files if f[1] == "diffusion_models"),
    )  # fmt: skip
    placed = canvas.add(
        "WanFitOffloadPolicy", (480, 0), [recipe.policy, recipe.vram_budget, 0.0, "auto", True],
        {"model": high, "model_low": low if recipe.experts else "MODEL"}, (("model", "MODEL"), ("model_low", "MODEL")),
        optional=("model_low",), size=(320, 170),
    )  # fmt: skip
    models = list(placed if recipe.experts else placed[:1])
    for index, lora in enumerate(recipe.loras):
        (models[index],) = canvas.add(
            "LoraLoaderModelOnly", (920, index * 160), [lora, 1.0], {"model": models[index]}, (("MODEL", "MODEL"),),
            size=(420, 90), models=((lora, "loras"),),
        )  # fmt: skip
    (clip,) = canvas.add(
        "WanFitTextEncoderLoader", (0, 220), [recipes.TEXT_ENCODER, "default"], None, (("clip", "CLIP"),),
        size=(420, 90), models=((recipes.TEXT_ENCODER, "text_encoders"),),
    )  # fmt: skip
    (vae,) = canvas.add(
        "VAELoader", (0, 370), [recipe.vae], None, (("VAE", "VAE"),), size=(420, 60), models=((recipe.vae, "vae"),)
    )
    encode = [
        canvas.add(
            "CLIPTextEncode", (480, 240 + i * 190), [text], {"clip": clip}, (("CONDITIONING", "CONDITIONING"),),
            size=(420, 150), title=title,
        )[0]
        for i, (text, title) in enumerate(((POSITIVE[recipe.kind], "Positive prompt"), (NEGATIVE, "Negative prompt")))
    ]  # fmt: skip
    positive, negative, latent = _latent(canvas, recipe, vae, encode)
    latent = _sample(canvas, recipe, models, positive, negative, latent)
    (image,) = canvas.add(
        "WanFitVAEDecode", (1780, 240), [recipe.tile_size], {"samples": latent, "vae": vae}, (("image", "IMAGE"),),
        size=(280, 90),
    )  # fmt: skip
    image, _, _ = canvas.add(
        "WanFitMemoryProbe", (1780, 400), ["sampling and decode"], {"anything": image},
        (("anything", "*"), ("report", "STRING"), ("chart", "IMAGE")), size=(420, 420),
    )  # fmt: skip
    image = (image[0], image[1], "IMAGE")
    (video,) = canvas.add(
        "CreateVideo", (2260, 240), [recipe.fps], {"images": image, "audio": "AUDIO"}, (("VIDEO", "VIDEO"),),
        optional=("audio",), size=(260, 80),
    )  # fmt: skip
    canvas.add("SaveVideo", (2260, 380), [f"video/{name}", "auto", "auto"], {"video": video}, size=(420, 400))
    return canvas.to_json()


def _latent(canvas: Canvas, recipe: Any, vae: Any, encode: list[Any]) -> tuple[Any, Any, Any]:
    positive, negative = encode
    size = [recipe.width, recipe.height, recipe.length, 1]
    if recipe.kind == "t2v":
        return (
            positive, negative,
            canvas.add("EmptyHunyuanLatentVideo", (960, 420), size, None, (("LATENT", "LATENT"),), size=(300, 130))[0],
        )  # fmt: skip
    image, _ = canvas.add(
        "LoadImage", (0, 490), ["example.png", "image"], None, (("IMAGE", "IMAGE"), ("MASK", "MASK")), size=(420, 340)
    )
    if recipe.kind == "ti2v":
        (latent,) = canvas.add(
            "Wan22ImageToVideoLatent", (960, 420), size, {"vae": vae, "start_image": image}, (("LATENT", "LATENT"),),
            optional=("start_image",), size=(320, 150),
        )  # fmt: skip
        return positive, negative, latent
    kind, images, visions = "WanImageToVideo", {"start_image": image}, ("clip_vision_output",)
    if recipe.kind == "flf2v":
        last, _ = canvas.add(
            "LoadImage", (0, 880), ["example.png", "image"], None, (("IMAGE", "IMAGE"), ("MASK", "MASK")),
            size=(420, 340), title="Last image",
        )  # fmt: skip
        kind, images = "WanFirstLastFrameToVideo", images | {"end_image": last}
        visions = ("clip_vision_start_image", "clip_vision_end_image")
    return tuple(
        canvas.add(
            kind, (960, 420), size,
            {
                "positive": positive, "negative": negative, "vae": vae,
                **dict.fromkeys(visions, "CLIP_VISION_OUTPUT"), **images,
            },
            (("positive", "CONDITIONING"), ("negative", "CONDITIONING"), ("latent", "LATENT")),
            optional=(*visions, *images), size=(320, 210),
        )
    )  # type: ignore[return-value]  # fmt: skip


def _sample(canvas: Canvas, recipe: Any, models: list[Any], positive: Any, negative: Any, latent: Any) -> Any:
    """One WanFitSampler for both experts; core's KSampler for the model without."""
    inputs = {"positive": positive, "negative": negative, "latent_image": latent}
    if not recipe.experts:
        (model,) = canvas.add(
            "ModelSamplingSD3", (1320, 0), [recipe.shift], {"model": models[0]}, (("MODEL", "MODEL"),), size=(260, 60)
        )
        widgets = [42, "randomize", recipe.steps, recipe.cfg, recipe.sampler, "simple", 1.0]
        return canvas.add(
            "KSampler", (1320, 240), widgets, {"model": model, **inputs}, (("LATENT", "LATENT"),), size=(280, 260)
        )[0]
    widgets = [
        42, "randomize", recipe.steps, recipe.cfg, recipe.cfg, recipe.sampler, "simple", recipe.shift, 0.0,
        0, 0, 10000, "enable", "disable", 1, "off",
    ]  # fmt: skip
    return canvas.add(
        "WanFitSampler", (1400, 0), widgets, {"model_high": models[0], **inputs, "model_low": models[1]},
        (("latent", "LATENT"), ("info", "STRING")), optional=("model_low",), size=(320, 520),
    )[0]  # fmt: skip


def thumbnail(path: Path, recipe: Any) -> None:
    picture = Image.new("RGB", (480, 300), (22, 27, 34))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((0, 0, 480, 8), fill=(64, 160, 255))
    title, _, memory = recipe.title.rpartition(", ")
    draw.text((24, 40), memory, font=ImageFont.load_default(64), fill=(240, 246, 252))
    draw.text((24, 140), title, font=ImageFont.load_default(21), fill=(160, 200, 255))
    facts = f"{recipe.width} x {recipe.height} x {recipe.length}, {recipe.steps} steps, policy {recipe.policy}"
    draw.text((24, 190), facts, font=ImageFont.load_default(18), fill=(170, 178, 189))
    files = recipe.model_high.rpartition(".")[2].replace("safetensors", "fp8" if "fp8" in recipe.model_high else "fp16")
    draw.text((24, 225), files, font=ImageFont.load_default(18), fill=(170, 178, 189))
    picture.save(path, quality=90)


def main() -> None:
    recipes = load_recipes()
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    folder = ROOT / "workflows"
    folder.mkdir(exist_ok=True)
    for name, recipe in recipes.RECIPES.items():
        text = json.dumps(build(name, recipe, recipes, version), ensure_ascii=False, indent=1)
        (folder / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        thumbnail(folder / f"{name}.jpg", recipe)


if __name__ == "__main__":
    main()
