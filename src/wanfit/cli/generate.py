"""`wanfit generate`: an image and a prompt to a video file with a memory report."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..errors import in_words
from .loras import read_lora
from .sizes import add_auto_options, auto_or_number
from .words import FLAGS


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "generate",
        help="make a video / 生成视频",
        description="Make a video from a prompt, and an image where the model takes one. What is not given is the "
        "model's official default. The model is a folder, or its files one by one, or both (a file wins). "
        "根据提示词（以及图像）生成视频。未给出的取模型的官方默认值。",
    )
    model = parser.add_argument_group("model / 模型")
    model.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="diffusers folder, or a folder that holds each part once / "
        "diffusers 文件夹，或每个部件只有一个文件的文件夹",
    )
    model.add_argument(
        "--high",
        type=Path,
        metavar="FILE",
        help="high-noise expert, or the only transformer / 高噪声专家，或唯一的模型",
    )
    model.add_argument("--low", type=Path, metavar="FILE", help="low-noise expert / 低噪声专家")
    model.add_argument("--text-encoder", type=Path, metavar="FILE", help="UMT5-XXL / 文本编码器")
    model.add_argument(
        "--vae",
        type=Path,
        metavar="FILE",
        help="Wan VAE: 2.1 for A14B, 2.2 for TI2V-5B / VAE：A14B 用 2.1，TI2V-5B 用 2.2",
    )
    model.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="where the text encoder file carries none / 文本编码器文件不带分词器时",
    )
    what = parser.add_argument_group("video / 视频")
    what.add_argument("--prompt", required=True, help="what the video shows / 提示词")
    what.add_argument("--negative", help="what it shall not show (default: the official Chinese text) / 反向提示词")
    what.add_argument("--image", type=Path, help="first frame (I2V) / 首帧")
    what.add_argument("--last-image", type=Path, help="last frame (I2V) / 尾帧")
    what.add_argument(
        "--width",
        type=auto_or_number,
        help="pixels, a multiple of 16 (TI2V-5B: 32); auto, with --height: the largest official size that fits / "
        "宽（像素），16 的倍数；auto：放得下的最大官方尺寸",
    )
    what.add_argument(
        "--height", type=auto_or_number, help="pixels, a multiple of 16 (TI2V-5B: 32), or auto / 高（像素），或 auto"
    )
    what.add_argument(
        "--frames",
        type=auto_or_number,
        dest="num_frames",
        help="4n+1; official: 81 (TI2V-5B: 121); auto: as many of them as fit / 帧数，4n+1；auto：放得下的最多帧数",
    )
    add_auto_options(what)
    what.add_argument("--fps", type=int, help="frames a second of the file; official: 16 (TI2V-5B: 24) / 每秒帧数")
    what.add_argument("--seed", type=int, default=0, help="same seed, same video (default: 0) / 随机种子")
    what.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="FILE[:STRENGTH][:EXPERT]",
        help="may be given several times; expert: high, low, both (default: what the file name says, else both) / "
        "可多次给出；专家：high、low、both（默认按文件名）",
    )
    sampling = parser.add_argument_group("sampling / 采样")
    sampling.add_argument("--steps", type=int, help="denoising steps over both experts / 步数")
    sampling.add_argument(
        "--sampler",
        default="unipc",
        help="unipc (official) or euler (for 4-step LoRAs) / 采样器：unipc（官方）或 euler（4 步 LoRA）",
    )
    sampling.add_argument("--shift", type=float, help="sigma shift; official: 5 (T2V-A14B: 12) / 噪声偏移")
    sampling.add_argument(
        "--boundary",
        type=float,
        dest="boundary_ratio",
        help="noise level of the switch, 0 to 1 / 切换专家的噪声水平，0 到 1",
    )
    sampling.add_argument(
        "--guidance",
        type=float,
        dest="guidance_scale",
        help="CFG; of the high expert when two / 引导强度；有两个专家时为高噪声专家的",
    )
    sampling.add_argument(
        "--guidance-low", type=float, dest="guidance_scale_2", help="CFG of the low expert / 低噪声专家的引导强度"
    )
    place = parser.add_argument_group("where it runs / 运行位置")
    place.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1 ... / 设备")
    place.add_argument("--dtype", default="auto", help="auto, bfloat16, float16, float32 / 计算精度")
    place.add_argument("--vae-dtype", default="auto", help="auto, bfloat16, float16, float32 / VAE 的精度")
    place.add_argument(
        "--chunk-tokens",
        type=int,
        default=4096,
        help="tokens worked on at a time; less needs less memory (default: 4096) / 每次处理的 token 数；越少越省内存",
    )
    place.add_argument(
        "--text",
        default="auto",
        help="text encoder: cpu, stream (through the device), auto / "
        "文本编码器的位置：cpu、stream（逐层经过显卡）、auto",
    )
    place.add_argument(
        "--no-fp8-matmul",
        action="store_true",
        help="bring fp8 weights to 16 bit before each product, on cards that could multiply them in fp8: slower, and "
        "activations are not rounded to fp8 / 不用 fp8 做矩阵乘法：较慢，舍入较少",
    )
    place.add_argument(
        "--attention",
        default="auto",
        metavar="NAME",
        help="auto (the fastest exact one, measured once), sdpa, cudnn, flash, efficient, xformers; rounding to 8 "
        "bits: sageattention, comfy_kitchen / 注意力实现；sageattention 和 comfy_kitchen 会舍入到 8 位",
    )
    place.add_argument(
        "--policy",
        default="auto",
        help="blocks on a CUDA device: auto (as many stay as hide the transfers), resident (all), stream (none) / "
        "留在显存的块：auto（足以隐藏传输）、resident（全部）、stream（不留）",
    )
    place.add_argument(
        "--vram-budget",
        type=float,
        metavar="GIB",
        help="device memory to stay within (default: free) / 显存上限（默认：空闲的全部）",
    )
    place.add_argument(
        "--ram-budget",
        type=float,
        metavar="GIB",
        help="host memory for blocks (default: 60 %% of free) / 块可用的内存（默认：空闲的 60 %%）",
    )
    output = parser.add_argument_group("output / 输出")
    output.add_argument("--out", type=Path, required=True, metavar="FILE.mp4", help="the video / 输出视频")
    output.add_argument(
        "--resume", type=Path, metavar="FILE", help="go on from what the same command left / 从中断处继续"
    )
    output.add_argument(
        "--save-every",
        type=int,
        default=1,
        metavar="STEPS",
        help="keep what is reached beside the video (20 MB or so) after so many steps, until it is finished (default: "
        "1; 0: only when the run ends by an error or Ctrl-C) / 每隔几步保存进度（默认 1；0：只在出错或 Ctrl-C 时）",
    )
    output.add_argument(
        "--report", type=Path, metavar="FILE.json", help="memory and settings of the run / 内存与设置的报告"
    )
    output.add_argument("--chart", type=Path, metavar="FILE.png", help="memory over time, by stage / 内存曲线图")
    output.add_argument(
        "--json",
        action="store_true",
        help="print the report on stdout, all else on stderr / 报告写到 stdout，其余写到 stderr",
    )
    parser.set_defaults(run=run, words=FLAGS)


def run(options: argparse.Namespace) -> int:
    # Advice about optional packages of transformers that WanFit does not use.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

    from tqdm import tqdm

    from ..pipeline.files import find_model
    from ..pipeline.generate import generate
    from ..pipeline.placement import choose_placement
    from ..pipeline.request import DEFAULT_NEGATIVE, Request, check_numbers

    negative = DEFAULT_NEGATIVE if options.negative is None else options.negative
    names = (
        "prompt out image last_image width height num_frames portrait prefer steps seed sampler shift boundary_ratio"
    )
    names += " guidance_scale guidance_scale_2 fps"
    request = Request(
        negative_prompt=negative,
        loras=tuple(read_lora(text) for text in options.lora),
        **{name: getattr(options, name) for name in names.split()},
    )
    check_numbers(request)
    placement = choose_placement(
        options.device,
        options.dtype,
        options.vae_dtype,
        options.text,
        chunk_tokens=options.chunk_tokens,
        fp8_matmul=not options.no_fp8_matmul,
        attention=options.attention,
        policy=options.policy,
        vram_budget_gib=options.vram_budget,
        ram_budget_gib=options.ram_budget,
    )
    files = find_model(
        options.model,
        high=options.high,
        low=options.low,
        text_encoder=options.text_encoder,
        vae=options.vae,
        tokenizer=options.tokenizer,
    )
    stream = sys.stderr if options.json else sys.stdout

    def tell(text: str) -> None:
        with suppress(BrokenPipeError):  # who read it has gone, as `| head` does; the video is still wanted
            tqdm.write(in_words(text, FLAGS), file=stream)  # keeps clear of the progress bar

    report = generate(
        files,
        request,
        placement,
        report_path=options.report,
        chart_path=options.chart,
        resume=options.resume,
        save_every=options.save_every,
        tell=tell,
    )
    if options.json:
        print(json.dumps(report, indent=2))
    return 0
