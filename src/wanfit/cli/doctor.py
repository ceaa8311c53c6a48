"""`wanfit doctor`: what this machine is, what is used on it and why not more."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .words import FLAGS


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="examine this machine / 检查环境",
        description="Say what PyTorch, driver and card are, which kernels are used and why not others, which allocator "
        "settings take effect, what limits RAM, and which processes are on the card. Changes nothing. "
        "说明本机的 PyTorch、驱动和显卡、所用的内核及原因、分配器设置、内存限制和显卡上的进程。不作更改。",
    )
    parser.add_argument(
        "--models",
        type=Path,
        metavar="DIR",
        help="folder of models: measure how fast its disk reads / 模型文件夹：测量其磁盘的读取速度",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object / 输出 JSON")
    parser.set_defaults(run=run, words=FLAGS)


def run(options: argparse.Namespace) -> int:
    from ..memory.doctor import examine
    from ..memory.report import finding_lines

    findings = examine(options.models)
    if options.json:
        print(json.dumps({"findings": [asdict(finding) for finding in findings]}, indent=2))
        return 0
    print("\n".join(finding_lines(findings)))
    return 0
