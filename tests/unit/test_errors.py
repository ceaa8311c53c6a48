"""The registry of error codes and the errors raised in the source are the same, both ways."""

import ast
from pathlib import Path

import pytest

from wanfit import errors

ROOT = Path(__file__).resolve().parents[2]
CLASSES = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}


def codes_in_source() -> dict[str, list[str]]:
    """Codes given literally as the first argument of an error class, with the places."""
    found: dict[str, list[str]] = {}
    for folder in (ROOT / "src", ROOT / "nodes"):
        for path in folder.rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or not node.args:
                    continue
                name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
                first = node.args[0]
                if name in CLASSES and isinstance(first, ast.Constant):
                    found.setdefault(str(first.value), []).append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def test_every_raised_code_is_registered_and_every_registered_code_is_raised():
    raised = codes_in_source()
    assert set(raised) == set(errors.CODES), {
        "not registered": {code: raised[code] for code in set(raised) - set(errors.CODES)},
        "never raised": set(errors.CODES) - set(raised),
    }


def test_a_front_end_renders_its_own_names():
    error = errors.InputError("frames_invalid", "input", "<num_frames> is 80", "Use 77 or 81 for <num_frames>")
    assert str(error) == "[frames_invalid] num_frames is 80 (stage: input). Use 77 or 81 for num_frames."
    assert error.render({"num_frames": "--frames"}).startswith("[frames_invalid] --frames is 80")


def test_an_unregistered_code_is_a_mistake_of_ours():
    with pytest.raises(LookupError):
        errors.WanFitError("no_such_code", "input", "x")
