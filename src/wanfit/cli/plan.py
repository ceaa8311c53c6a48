"""`wanfit plan`: whether a video fits a machine, before anything is downloaded or loaded."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .plan_input import loras_of, machine_of, model_of
from .sizes import add_auto_options, auto_or_number
from .words import FLAGS

if TYPE_CHECKING:
    from ..memory.advice import Settings
    from ..memory.parts import Model
    from ..memory.plan import Plan

EXIT_FITS, EXIT_DOES_NOT_FIT = 0, 1

WORDS = FLAGS | {
    "vram": "--vram",
    "ram": "--ram",
    "capability": "--capability",
    "bandwidth": "--bandwidth",
    "block_seconds": "--block-ms",
    "disk": "--disk",
    "batch": "--batch",
    "transformer": "the first file of --model",
    "transformer_2": "the second file of --model",
    "high": "--model (high-noise expert)",
    "low": "--model (low-noise expert)",
    "text_encoder": "--model (text encoder)",
    "vae": "--model (VAE)",
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        help="say whether a video fits / 预先计算内存",
        description="Say what a video will need, stage by stage, and whether it fits. Reads headers only and needs no "
        "GPU. Exit code 0: fits (or is tight), 1: does not fit, 2: bad input. "
        "逐阶段说明视频需要多少内存、是否放得下。只读文件头，不需要显卡。退出码 0：放得下，1：放不下，2：输入有误。",
    )
    parser.add_argument(
        "--model",
        nargs="+",
        required=True,
        metavar="MODEL",
        help="a name such as i2v-a14b:fp8, t2v-a14b:q4_k_m, ti2v-5b:fp16; or files; or a folder with all parts / "
        "模型名、文件，或含全部部件的文件夹",
    )
    parser.add_argument(
        "--width",
        type=auto_or_number,
        help="pixels; without width and height, or auto: the largest official that fits / "
        "宽（像素）；不给或 auto：放得下的最大官方尺寸",
    )
    parser.add_argument("--height", type=auto_or_number, help="pixels, or auto / 高（像素），或 auto")
    parser.add_argument(
        "--frames",
        type=auto_or_number,
        dest="num_frames",
        help="4n+1 (default: the official length); auto: as many of them as fit / 帧数，4n+1；auto：放得下的最多帧数",
    )
    add_auto_options(parser)
    parser.add_argument(
        "--text-only",
        action="store_true",
        help="no image, where the model does not need one / 没有图像（模型不一定需要时）",
    )
    parser.add_argument(
        "--image",
        action="store_true",
        help="an image, where the model does not need one (TI2V-5B) / 有图像（模型不一定需要时，TI2V-5B）",
    )
    parser.add_argument(
        "--vram",
        type=float,
        metavar="GIB",
        help="of the card; 0: the CPU (default: this machine) / 显卡的显存；0：CPU（默认：本机）",
    )
    parser.add_argument(
        "--vram-used",
        type=float,
        default=0.0,
        metavar="GIB",
        help="of it, by the desktop and others / 其中已被桌面等占用的",
    )
    parser.add_argument(
        "--ram", type=float, metavar="GIB", help="installed (default: this machine's) / 内存总量（默认：本机）"
    )
    parser.add_argument(
        "--capability",
        metavar="X.Y",
        help="of the card, such as 8.6 or 8.9; more can mean less memory / 显卡的计算能力",
    )
    parser.add_argument(
        "--policy",
        default="auto",
        help="auto, resident (all blocks on the card), stream (none) / "
        "留在显存的块：auto、resident（全部）、stream（不留）",
    )
    parser.add_argument(
        "--chunk-tokens", type=int, default=4096, help="at most (default: 4096) / 每次处理的 token 数上限"
    )
    parser.add_argument(
        "--batch",
        type=int,
        default=1,
        metavar="N",
        help="videos at a time, as ComfyUI's latents may hold (default: 1) / 同时生成的视频数",
    )
    parser.add_argument(
        "--packed",
        action="store_true",
        help="q, k and v of the attention in 8 bits, which a run takes only when memory has run out / "
        "注意力的 q、k、v 用 8 位保存（运行时只在内存用尽后才这样做）",
    )
    parser.add_argument(
        "--bandwidth",
        type=float,
        metavar="GB/S",
        help="RAM to card, for the expected slow-down / 内存到显卡的带宽，用于估计变慢多少",
    )
    parser.add_argument(
        "--block-ms",
        type=float,
        metavar="MS",
        help="one block's forward, for the expected slow-down / 一个块的计算时间",
    )
    parser.add_argument(
        "--disk", type=float, metavar="GB/S", help="the model's disk, for the expected slow-down / 模型所在磁盘的速度"
    )
    parser.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:STRENGTH][:EXPERT]",
        help="counted too; needs the model's file; may be given several times / LoRA 也计入；需要模型文件；可多次给出",
    )
    parser.add_argument("--chart", type=Path, metavar="FILE.png", help="draw the stages by cause / 按原因画出各阶段")
    parser.add_argument("--json", action="store_true", help="print one JSON object / 输出 JSON")
    parser.set_defaults(run=run, words=WORDS)


def run(options: argparse.Namespace) -> int:
    from ..errors import InputError, OutputError
    from ..memory.advice import Search, largest_official, nearest
    from ..memory.plan import Options, check_frames, make_plan
    from ..memory.report import plan_lines
    from ..pipeline.outputs import check_output, whole_file

    for name in ("width", "height"):
        if getattr(options, name) == "auto":
            setattr(options, name, None)
    if (options.width is None) != (options.height is None):
        raise InputError("size_invalid", "plan", "only one of <width> and <height> is given", "Give both or none")
    for name in ("chunk_tokens", "batch"):
        value = getattr(options, name)
        if value < 1:
            raise InputError("number_invalid", "plan", f"<{name}> is {value}", "Use 1 or more")
    if isinstance(options.num_frames, int):
        check_frames(options.num_frames)
    if options.chart is not None:
        check_output("chart", options.chart, ".png")
    model, files, notices = model_of(options.model)
    machine = machine_of(options)
    loras = loras_of(options.lora, files, machine, notices)
    if model.transformers[0].image_dim:
        notices.append("the CLIP vision encoder of this Wan 2.1 model is not counted")
    if options.image and not model.variant.takes_image:
        raise InputError("image_unexpected", "plan", f"<image> is given and {model.variant.title} takes none")
    image = True if options.image else False if options.text_only and not model.variant.needs_image else None
    frames = model.variant.num_frames if options.num_frames in (None, "auto") else options.num_frames
    wanted = Options(
        image=image,
        chunk_tokens=options.chunk_tokens,
        loras=loras,
        batch=options.batch,
        packed_attention=options.packed,
    )
    search = Search(model, machine, wanted)
    fitting: list[Settings] = []
    if options.width is None:
        found = largest_official(search, portrait=options.portrait, num_frames=frames, prefer=options.prefer)
        smallest = min(model.variant.sizes, key=lambda size: size[0] * size[1])
        width, height, frames = (*smallest, frames) if found is None else (found.width, found.height, found.num_frames)
    else:
        width, height = options.width, options.height
        longest = search.longest(width, height, frames) if options.num_frames == "auto" else None
        frames = frames if longest is None else longest.num_frames
    plan = make_plan(model, machine, width, height, frames, wanted)
    if not plan.fits and options.width is not None:
        fitting = nearest(search, width, height, frames, options.prefer)
    if options.chart is not None:
        from ..memory.plan_chart import draw_plan

        try:
            with whole_file(options.chart) as path:
                draw_plan(plan, path)
        except OSError as error:
            raise OutputError(
                "output_unwritable", "plan", f"the chart cannot be written: {error}", "Give another <chart>"
            ) from error
    if options.json:
        print(json.dumps(_json(model, plan, fitting, notices), indent=2))
    else:
        _print(model, plan, fitting, notices, plan_lines(plan))
    return EXIT_FITS if plan.fits else EXIT_DOES_NOT_FIT


def _print(model: Model, plan: Plan, fitting: list[Settings], notices: list[str], lines: list[str]) -> None:
    print(f"{model.variant.title}: {' + '.join(part.name for part in model.transformers)}")
    for notice in notices:
        print(f"note: {notice}")
    print("\n".join(lines))
    for settings in fitting:
        print(f"what fits: {settings.describe()} ({settings.plan.verdict})")
    if not plan.fits and not fitting:
        print("what fits: nothing of use at any size; take a smaller file (Q4_K_M, fp8) or more memory")


def _json(model: Model, plan: Plan, fitting: list[Settings], notices: list[str]) -> dict[str, object]:
    return {
        "model": [part.name for part in model.transformers],
        "text_encoder": model.text_encoder.name,
        "vae": model.vae.name,
        "notices": notices,
        **plan.to_json(),
        "fitting": [
            {
                "width": settings.width,
                "height": settings.height,
                "num_frames": settings.num_frames,
                "verdict": settings.plan.verdict,
            }
            for settings in fitting
        ],
    }
