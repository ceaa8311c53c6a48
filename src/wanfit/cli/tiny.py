"""`wanfit tiny`: small models with random weights in the community's layouts, to try everything without downloads."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .words import FLAGS


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tiny",
        help="write tiny random-weight models / 生成用于测试的随机小模型",
        description="Write a tiny I2V-A14B pair (high: scaled fp8, low: GGUF), a UMT5 with its tokenizer and a VAE, "
        "named and laid out as the real files are. The weights are random: what they generate is noise. "
        "写出随机权重的小模型，布局与真实文件相同；生成的是噪声。",
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write to; made when missing / 写入的文件夹；没有则创建"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0) / 权重的随机种子")
    parser.set_defaults(run=run, words=FLAGS)


def run(options: argparse.Namespace) -> int:
    from ..errors import InputError
    from ..tiny.models import write_tiny_models

    if not 0 <= options.seed < 2**32:
        raise InputError("number_invalid", "input", f"<seed> is {options.seed}", f"Use 0 to {2**32 - 1}")
    for path in write_tiny_models(options.out, seed=options.seed):
        print(path)
    return 0
