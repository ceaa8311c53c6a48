"""The command line: `wanfit inspect`, `plan`, `generate`, `doctor`, `tiny`.

Exit codes: 0 done; 1 `plan` says that it does not fit; 2 the input cannot work, with one message on stderr;
3 the run failed for a cause that is known, such as memory that is full; 130 interrupted; 143 terminated (SIGTERM);
141 who read the output has gone, as `| head` does.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from .. import __version__
from ..errors import RunError, WanFitError
from . import doctor, generate, inspect, plan, tiny

EXIT_BAD_INPUT = 2
EXIT_RUN_FAILED = 3
EXIT_INTERRUPTED = 130
EXIT_NO_READER = 141
EXIT_TERMINATED = 143


class _Terminated(KeyboardInterrupt):
    """SIGTERM, as `kill`, Docker and systemd send it: what an interrupt cleans up and keeps, it does too."""


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
    _take_any_text()
    options = parser.parse_args(arguments)
    run: Callable[[argparse.Namespace], int] = options.run
    try:
        with _sigterm_interrupts():
            code = run(options)
            sys.stdout.flush()
            return code
    except WanFitError as error:
        print(f"wanfit: {error.render(options.words)}", file=sys.stderr)
        return EXIT_RUN_FAILED if isinstance(error, RunError) else EXIT_BAD_INPUT
    except KeyboardInterrupt as error:
        terminated = isinstance(error, _Terminated)
        print(f"wanfit: {'terminated' if terminated else 'interrupted'}; no half-written file is left", file=sys.stderr)
        return EXIT_TERMINATED if terminated else EXIT_INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes out the rest when it ends
        return EXIT_NO_READER


def _take_any_text() -> None:
    """A pipe on Windows and the C locale take few characters: others are written as \\uXXXX instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextmanager
def _sigterm_interrupts() -> Generator[None]:
    def stop(number: int, frame: FrameType | None) -> NoReturn:
        raise _Terminated

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
