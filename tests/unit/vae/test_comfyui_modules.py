"""ComfyUI's own Wan VAE modules, in a process of the tree's own Python."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
from comfyui_server import Tree, find_trees  # noqa: E402

TREES = find_trees()


@pytest.mark.comfyui
@pytest.mark.skipif(not TREES, reason="no ComfyUI source tree: set COMFYUI_PATH")
@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.version)
def test_same_pixels_and_latents(tree: Tree) -> None:
    """1e-5, as ComfyUI steps in time differently (0.33.0: two latent frames), so additions come in another order."""
    case = ROOT / "tests" / "support" / "comfy_vae_case.py"
    done = subprocess.run(
        [str(tree.python), str(case), str(tree.root), str(ROOT / "src")], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for result in found.values():
        assert result["tiles"] == [6, 4]
        assert result["range"] > 0.2
        assert result["decode"] <= 1e-5
        assert result["encode"] <= 1e-5
