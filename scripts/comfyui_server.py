"""A real ComfyUI from its source tree, as a subprocess: for tests and for `scripts/dev.py comfyui`.

    for tree in find_trees():
        with Server(tree, base) as server:
            entry = server.run({"1": {"class_type": "EmptyImage", "inputs": {...}}})

Standard library only, so that it runs before anything is installed. As a program it serves until Ctrl-C:

    python scripts/comfyui_server.py BASE [--version 0.33.0] [-- options of ComfyUI]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

PACK = Path(__file__).resolve().parent.parent
_START_S = 180


@dataclass(frozen=True)
class Tree:
    """A ComfyUI source tree and the Python that has its requirements."""

    root: Path
    python: Path

    @property
    def version(self) -> str:
        text = (self.root / "comfyui_version.py").read_text(encoding="utf-8")
        return text.partition('__version__ = "')[2].partition('"')[0]


class PromptFailed(Exception):
    """A prompt was refused or a node failed; `details` is what the server said."""

    def __init__(self, message: str, details: Any) -> None:
        super().__init__(message)
        self.details = details


def find_trees() -> list[Tree]:
    """COMFYUI_PATH (one or more trees, as PATH is written), else ~/comfyui/*.

    The Python is COMFYUI_PYTHON, else of `venv-<name>` beside the tree, of `venv` or `.venv` in it, else this one.
    """
    given = os.environ.get("COMFYUI_PATH")
    home = Path.home() / "comfyui"
    roots = [Path(p) for p in given.split(os.pathsep)] if given else sorted(home.iterdir()) if home.is_dir() else []
    return [Tree(root, python_for(root)) for root in roots if (root / "comfyui_version.py").is_file()]


def python_for(root: Path) -> Path:
    if named := os.environ.get("COMFYUI_PYTHON"):
        return Path(named)
    inside = ("Scripts/python.exe",) if os.name == "nt" else ("bin/python",)
    for folder in (root.parent / f"venv-{root.name}", root / "venv", root / ".venv"):
        for part in inside:
            if (folder / part).exists():
                return folder / part
    return Path(sys.executable)


def prepare_base(base: Path, packs: Mapping[str, Path]) -> None:
    """An isolated --base-directory: models, input, output, and links to custom node packs."""
    for folder in ("custom_nodes", "input", "output", "temp", "user"):
        (base / folder).mkdir(parents=True, exist_ok=True)
    for kind in ("diffusion_models", "text_encoders", "vae", "loras", "clip_vision", "vae_approx", "checkpoints"):
        (base / "models" / kind).mkdir(parents=True, exist_ok=True)
    for name, source in packs.items():
        link = base / "custom_nodes" / name
        if link.exists() or link.is_symlink():
            continue
        try:
            link.symlink_to(source, target_is_directory=True)
        except OSError:  # Windows without the right to make links
            ignored = shutil.ignore_patterns(".git", ".venv", "__pycache__", "demo")
            shutil.copytree(source, link, ignore=ignored)


class Server:
    """A running server. Use as a context manager.

    Args:
        base: from `prepare_base`.
        options: of ComfyUI's command line, `--cpu` for example.
    """

    def __init__(
        self, tree: Tree, base: Path, options: Sequence[str] = ("--cpu",), env: Mapping[str, str] | None = None
    ) -> None:
        self.tree, self.base = tree, base
        self.port = _free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.log_path = base / "server.log"
        self._options, self._env = list(options), dict(env or {})
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        if self._process is None:
            raise RuntimeError("the server is not running")
        return self._process.pid

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def start(self) -> None:
        """Start and wait until it answers."""
        command = [
            str(self.tree.python), "main.py", *self._options, "--port", str(self.port), "--disable-auto-launch",
            "--base-directory", str(self.base), "--database-url", "sqlite:///:memory:",
        ]  # fmt: skip
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.tree.root,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUTF8": "1", **self._env},
            )
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                raise RuntimeError(f"ComfyUI ended with {self._process.returncode}:\n{self.log[-4000:]}")
            try:
                self.get("/system_stats")
                return
            except OSError:
                time.sleep(0.3)
        self.stop()
        raise RuntimeError(f"ComfyUI did not answer within {_START_S} s:\n{self.log[-4000:]}")

    def stop(self) -> None:
        """End the server; kill it if it does not go."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None

    def get(self, path: str) -> Any:
        """A JSON answer, or bytes when it is none."""
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:  # noqa: S310 - always http to itself
            body = answer.read()
            return json.loads(body) if "json" in answer.headers.get("Content-Type", "") else body

    def post(self, path: str, data: Any) -> Any:
        request = urllib.request.Request(  # noqa: S310
            self.address + path, json.dumps(data).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
            body = answer.read()
        return json.loads(body) if body else None

    def queue(self, prompt: Mapping[str, Any], client_id: str | None = None) -> str:
        """Queue a prompt in API format; returns its id.

        Args:
            client_id: of the websocket that is told about it.

        Raises:
            PromptFailed: it does not validate; details are the node errors.
        """
        try:
            return self.post("/prompt", {"prompt": prompt, "client_id": client_id or uuid.uuid4().hex})["prompt_id"]
        except urllib.error.HTTPError as error:
            answer = json.loads(error.read())
            raise PromptFailed(json.dumps(answer, ensure_ascii=False), answer.get("node_errors") or answer) from error

    def wait(self, prompt_id: str, timeout_s: float = 120) -> dict[str, Any]:
        """The history entry of a prompt that has ended, however it did."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            entry = self.get(f"/history/{prompt_id}").get(prompt_id)
            if entry is not None and entry.get("status") is not None:
                return entry
            time.sleep(0.05)
        raise TimeoutError(f"prompt {prompt_id} did not end within {timeout_s} s:\n{self.log[-3000:]}")

    def run(self, prompt: Mapping[str, Any], timeout_s: float = 120) -> dict[str, Any]:
        """Queue a prompt and wait for its success.

        Raises:
            PromptFailed: it was refused, or a node failed; the message is the node's own.
        """
        entry = self.wait(self.queue(prompt), timeout_s)
        if entry["status"]["status_str"] != "success":
            kind, details = entry["status"]["messages"][-1]
            raise PromptFailed(f"{kind}: {details.get('exception_message', '')}", details)
        return entry

    @staticmethod
    def executed(entry: Mapping[str, Any], prompt: Mapping[str, Any]) -> set[str]:
        """Ids of the nodes that ran and were not taken from the cache."""
        cached: set[str] = set()
        for kind, details in entry["status"]["messages"]:
            if kind == "execution_cached":
                cached |= set(details["nodes"])
        return set(prompt) - cached

    def interrupt(self) -> None:
        self.post("/interrupt", {})


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Serve BASE until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("--version", help="of the source tree to take (default: the newest found)")
    parser.add_argument("options", nargs="*", help="of ComfyUI (default: --cpu)")
    given = parser.parse_args()
    trees = [tree for tree in find_trees() if given.version in (None, tree.version)]
    if not trees:
        raise SystemExit("no ComfyUI source tree: set COMFYUI_PATH, or put one below ~/comfyui")
    newest = max(trees, key=lambda tree: [int(part) for part in tree.version.split(".") if part.isdigit()])
    with Server(newest, given.base.resolve(), given.options or ["--cpu"]) as server:
        print(f"ComfyUI {newest.version}: {server.address}\nlog: {server.log_path}\nCtrl-C ends it.", flush=True)
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            print("ending", flush=True)


if __name__ == "__main__":
    main()
