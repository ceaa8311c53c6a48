"""The one entry for people and CI. Standard library only; makes its own virtual environment in `.venv`.

python scripts/dev.py demo [--out DIR] [--image FILE] [--prompt TEXT]
python scripts/dev.py test [--tier TIER] [--require TIER] [-k EXPR]     includes check
python scripts/dev.py check
python scripts/dev.py bench NAME [arguments of scripts/bench/NAME.py]
python scripts/dev.py comfyui [--version 0.33.0] [-- options of ComfyUI]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")
PYTHON = BIN / ("python.exe" if os.name == "nt" else "python")
MINIMUM = (3, 10)


def run(*command: str | Path, check: bool = True) -> int:
    """Run a command in the repository root; end with its exit code when it fails and `check` is set."""
    print("+", *(str(part) for part in command), flush=True)
    code = subprocess.run([str(part) for part in command], cwd=ROOT).returncode
    if check and code:
        raise SystemExit(code)
    return code


def ensure_environment() -> None:
    """Make `.venv` and install the project into it, again only when pyproject.toml changed."""
    if sys.version_info < MINIMUM:
        raise SystemExit(f"WanFit needs Python {MINIMUM[0]}.{MINIMUM[1]} or newer; this is {sys.version.split()[0]}")
    stamp = VENV / "installed"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if PYTHON.exists() and stamp.exists() and stamp.read_text() == wanted:
        return
    if not PYTHON.exists():
        print(f"making {VENV}", flush=True)
        venv.EnvBuilder(with_pip=True).create(VENV)
    run(PYTHON, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", ".[dev]")
    stamp.write_text(wanted)


def check() -> None:
    run(PYTHON, "-m", "ruff", "check", ".")
    run(PYTHON, "-m", "ruff", "format", "--check", ".")
    run(PYTHON, "-m", "pyright")
    run(BIN / "lint-imports")


def test(options: argparse.Namespace, rest: list[str]) -> None:
    check()
    command: list[str] = []
    if options.tier:
        command += ["--tier", options.tier]
    if options.require:
        command += ["--require", options.require]
    if options.k:
        command += ["-k", options.k]
    if not any(part.startswith("-n") for part in rest):
        command += ["-n", str(min(4, os.cpu_count() or 1)), "--dist", "loadgroup"]
    # One thread in each process: tiny tensors gain nothing from more, and processes fight over the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    run(PYTHON, "-m", "pytest", *command, *rest)


def bench(options: argparse.Namespace, rest: list[str]) -> None:
    script = ROOT / "scripts" / "bench" / f"{options.name}.py"
    if not script.is_file():
        known = ", ".join(sorted(path.stem for path in script.parent.glob("*.py")))
        raise SystemExit(f"there is no benchmark {options.name!r}; known: {known}")
    run(PYTHON, script, *rest)


def demo(options: argparse.Namespace) -> None:
    """The main job at a tiny size: models, what they are, one video through both experts, its memory report."""
    out = Path(options.out).resolve()
    models = out / "models"
    out.mkdir(parents=True, exist_ok=True)
    wanfit = (PYTHON, "-m", "wanfit")
    run(*wanfit, "tiny", "--out", models)
    run(*wanfit, "inspect", *sorted(path for path in models.rglob("*") if path.is_file()))
    image = Path(options.image).resolve() if options.image else ROOT / "assets" / "boat.jpg"
    results = ("--out", out / "demo.mp4", "--report", out / "report.json", "--chart", out / "memory.png")
    size = ("--width", "208", "--height", "128", "--frames", "9", "--steps", "4")
    run(*wanfit, "generate", "--model", models, "--image", image, "--prompt", options.prompt, *size, *results)
    print(
        f"""
Open {out / "demo.mp4"} and {out / "memory.png"}.
The weights of this demo are random and untrained, so the picture is noise; what it shows is that the files are
read, both experts run, and the memory is measured. With real weights (README, "Real weights"):
    {PYTHON} -m wanfit generate --model FOLDER --image PICTURE --prompt TEXT --out video.mp4 --report report.json""",
        flush=True,
    )


def comfyui(rest: list[str]) -> None:
    """A real ComfyUI with this pack, tiny models and the workflows set to them, until Ctrl-C."""
    base = ROOT / "demo" / "comfyui"
    run(PYTHON, "scripts/comfyui_demo.py", base, "--wide-vae")
    run(PYTHON, "scripts/comfyui_server.py", base, *rest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("check", help="ruff, pyright, import rules")
    tests = commands.add_parser("test", help="check, then pytest")
    tests.add_argument("--tier", help="run this tier only: unit, nodes, comfyui, cuda, multi_gpu, browser")
    tests.add_argument("--require", help="a skip in this tier is a failure")
    tests.add_argument("-k", metavar="EXPR", help="pytest's -k")
    show = commands.add_parser("demo", help="tiny models, one video, a memory report")
    show.add_argument("--out", default="demo", help="folder for the result (default: demo)")
    show.add_argument("--image", help="start image (default: the one shipped in the repository)")
    show.add_argument("--prompt", default="a sailing boat on a calm sea at sunset", help="what the video shows")
    benches = commands.add_parser("bench", help="run scripts/bench/NAME.py")
    benches.add_argument("name")
    commands.add_parser("comfyui", help="a real ComfyUI with the pack, tiny models and the workflows")
    options, rest = parser.parse_known_args()
    if rest and options.command in {"check", "demo"}:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    ensure_environment()
    if options.command == "check":
        check()
    elif options.command == "demo":
        demo(options)
    elif options.command == "comfyui":
        comfyui(rest)
    else:
        {"test": test, "bench": bench}[options.command](options, rest)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:  # how `comfyui` is ended
        raise SystemExit(130) from None
