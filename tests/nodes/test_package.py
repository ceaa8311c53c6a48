"""What the registry's zip would hold: runtime files, and nothing that its scanner flags. No ComfyUI."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = {"subprocess", "pickle", "socket", "urllib", "requests", "http", "huggingface_hub", "ftplib", "ctypes.util"}


def git(*arguments: str) -> set[str]:
    result = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    if result.returncode:
        pytest.skip(f"not a git checkout: {result.stderr.strip()}")
    return set(result.stdout.splitlines())


def shipped() -> set[str]:
    """Tracked files without those that .comfyignore names, as comfy-cli packs them."""
    return git("ls-files") - git("ls-files", "--cached", "--ignored", "--exclude-from=.comfyignore")


def test_only_runtime_files_are_shipped() -> None:
    folders = {name.split("/")[0] for name in shipped()}
    assert folders == {
        "LICENSE", "README.md", "__init__.py", "locales", "nodes", "pyproject.toml", "requirements.txt", "src", "web",
        "workflows",
    }  # fmt: skip
    assert not any(name.endswith((".pyc", ".so", ".zip")) for name in shipped())
    assert not any((ROOT / name).is_symlink() for name in shipped())


@pytest.mark.parametrize("tracked", [True, False], ids=["git", "no git"])
def test_the_zip_of_comfy_cli_has_those_files_and_no_others(tmp_path: Path, tracked: bool) -> None:
    """From a folder with everything that lies about in one; without git comfy-cli packs what it finds."""
    for name in git("ls-files"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    if tracked:
        for command in (["init", "--quiet"], ["add", "--all"]):
            subprocess.run(["git", *command], cwd=tmp_path, check=True)
    for name in (".gpu/a.whl", ".venv/bin/b.py", "nodes/__pycache__/c.pyc", "src/wanfit.egg-info/d", "demo/e.mp4"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    comfy = [str(Path(sys.executable).with_name("comfy")), "--skip-prompt", "--no-enable-telemetry", "node", "pack"]
    subprocess.run(comfy, cwd=tmp_path, check=True, capture_output=True)
    with zipfile.ZipFile(tmp_path / "node.zip") as packed:
        assert set(packed.namelist()) == shipped()


def test_no_network_no_subprocess_no_pickle_no_eval() -> None:
    for name in sorted(shipped()):
        if not name.endswith(".py"):
            continue
        tree = ast.parse((ROOT / name).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [node.module or ""]
            for module in modules:
                assert module.split(".")[0] not in FORBIDDEN, (name, module)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in ("eval", "exec", "compile", "__import__"), (name, node.lineno)


def test_the_pack_imports_itself_relatively() -> None:
    """An absolute import works in the tests and fails in ComfyUI, which loads the pack by path."""
    for name in sorted(shipped()):
        if name.endswith(".py") and name.startswith(("nodes/", "src/", "__init__")):
            for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.level == 0:
                    assert (node.module or "").split(".")[0] not in ("wanfit", "nodes", "src"), name


CORE = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version", "folder_paths", "nodes", "server"}
ITS_OWN = {"torch", "triton"}  # ComfyUI's choice
OTHER_NAMES = {"PIL": "pillow", "pynvml": "nvidia-ml-py", "tokenizers": "transformers"}


def test_what_is_imported_is_in_the_requirements() -> None:
    """Manager installs requirements.txt and nothing else."""
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    required = {line.split(">=")[0] for line in lines if line and not line.startswith("#")}
    imported = set()
    for name in sorted(shipped()):
        if name.endswith(".py"):
            for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.level == 0:
                    imported.add((node.module or "").split(".")[0])
    outside = imported - set(sys.stdlib_module_names) - CORE - ITS_OWN
    assert {OTHER_NAMES.get(name, name) for name in outside} <= required


IMPORT_PACK = (
    "import importlib.util, sys\n"
    "spec = importlib.util.spec_from_file_location('pack', '__init__.py', submodule_search_locations=['.'])\n"
    "module = importlib.util.module_from_spec(spec)\n"
    "sys.modules['pack'] = module\n"
    "spec.loader.exec_module(module)\n"
    "assert module.WEB_DIRECTORY and module.comfy_entrypoint\n"
)


def test_importing_the_pack_is_cheap() -> None:
    """The root module brings in neither torch nor ComfyUI."""
    code = IMPORT_PACK + "print([n for n in ('torch', 'comfy', 'comfy_api', 'numpy') if n in sys.modules])\n"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(("version", "works"), [("0.3.63", False), ("0.3.64", True), ("0.33.0", True), ("1.0", True)])
def test_a_core_that_is_too_old_is_told(tmp_path: Path, version: str, works: bool) -> None:
    (tmp_path / "comfyui_version.py").write_text(f'__version__ = "{version}"\n')
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run([sys.executable, "-c", IMPORT_PACK], cwd=ROOT, capture_output=True, text=True, env=env)
    assert (result.returncode == 0) == works
    if not works:
        last = result.stderr.strip().splitlines()[-1]
        assert last == f"ImportError: WanFit needs ComfyUI 0.3.64 or newer, and this is {version}. Update ComfyUI."


def test_the_registry_is_told_the_same_minimum() -> None:
    comfy = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["comfy"]
    assert f'MINIMUM_COMFYUI = "{comfy["requires-comfyui"].removeprefix(">=")}"' in (ROOT / "__init__.py").read_text()
