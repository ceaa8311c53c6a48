"""What ComfyUI Manager installs, and what importing costs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def test_requirements_are_the_projects_dependencies_without_torch():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert sorted(line for line in lines if line and not line.startswith("#")) == sorted(project["dependencies"])
    assert not any(line.startswith("torch") for line in lines)


def test_version_is_said_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    import wanfit

    assert wanfit.__version__ == project["version"]


def test_importing_the_package_touches_neither_torch_nor_cuda():
    code = "import sys, wanfit; print([m for m in sys.modules if m.split('.')[0] in {'torch','diffusers','comfy'}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_help_of_the_command_line_needs_no_torch():
    code = (
        "import sys; from wanfit.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "inspect" in done.stdout and "generate" in done.stdout
    assert done.stderr.strip() == "False"
