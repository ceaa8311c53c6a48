"""The command line: `wanfit inspect`, `plan`, `generate`, `doctor`, `tiny`.

Exit codes: 0 done; 1 `plan` says that it does not fit; 2 the input cannot work, with one message on stderr;
3 the run failed for a cause that is known, such as memory that is full; 130 interrupted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from .. import __version__
from ..errors import RunError, WanFitError
from . import doctor, generate, inspect, plan, tiny

EXIT_BAD_INPUT = 2
EXIT_RUN_FAILED = 3
EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="wanfit",
        description="Run Wan 2.2 video models in the memory you have. 在有限内存中运行 Wan 2.2 视频模型。",
    )
    parser.add_argument("--version", action="version", version=f"wanfit {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (inspect, plan, generate, doctor, tiny):
        module.add_parser(commands)
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        return run(options)
    except WanFitError as error:
        print(f"wanfit: {error.render(options.words)}", file=sys.stderr)
        return EXIT_RUN_FAILED if isinstance(error, RunError) else EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("wanfit: interrupted; no output was written", file=sys.stderr)
        return EXIT_INTERRUPTED
