"""Versions that are known not to work together, each with the report that says so.

What is known of torch with its allocator's settings is in `allocator`; of its 3D convolution with cuDNN in
`vae.conv3d`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from .allocator import Finding
from .versions import installed_version

TORCH = "torch"
PACKAGES = (TORCH, "triton", "triton-windows", "sageattention", "comfy-aimdo")

BUILT_FOR_TORCH = ("torchvision", "torchaudio", "xformers")
"""Packages whose metadata name the one torch that they were compiled for."""


@dataclass(frozen=True)
class Pair:
    """Versions that are bad together.

    Args:
        versions: package -> PEP 440 specifier; all must be installed and match.
        says: what happens, and what to do.
        source: where it was reported.
        capability: (at least, below) of the card; None: any machine.
        state: of the finding.
    """

    versions: Mapping[str, str]
    says: str
    source: str
    capability: tuple[tuple[int, int], tuple[int, int]] | None = None
    state: str = "warning"


_TRITON_OF_TORCH = {"2.6": "3.2", "2.7": "3.3", "2.8": "3.4", "2.9": "3.5", "2.10": "3.6", "2.11": "3.6"}
"""Source: woct0rdho/triton-windows, notes of its releases ("Triton 3.6 only works with PyTorch >= 2.10", and so on);
for 2.11 Tavris1/ComfyUI-Easy-Install#192."""


def _newer_triton() -> Iterator[Pair]:
    for torch, triton in _TRITON_OF_TORCH.items():
        major, minor = triton.split(".")
        for package in ("triton", "triton-windows"):
            yield Pair(
                {TORCH: f"=={torch}.*", package: f">={major}.{int(minor) + 1}"},
                f"it is newer than the one of torch {torch}, {triton}: torch.compile fails on import (triton_key); "
                f'install "{package}<{major}.{int(minor) + 1}"',
                "kijai/ComfyUI-WanVideoWrapper#1506, unslothai/unsloth#2403",
            )


PAIRS: tuple[Pair, ...] = (
    *_newer_triton(),
    *(
        Pair(
            {package: below},
            "torch.compile of a float8 e4m3 model fails on this card (fp8e4nv); WanFit's own kernels do not need it",
            "kijai/ComfyUI-WanVideoWrapper#1030, pytorch/pytorch#167082, Lightricks/LTX-2#297",
            ((8, 0), (8, 9)),
            "note",
        )
        for package, below in (("triton", ">=0"), ("triton-windows", "<3.5.0.post21"))
    ),
    *(
        Pair(
            {package: ">=3.3"},
            "Triton dropped this generation of cards with 3.3: what it compiles may fail",
            "triton-lang/triton#5066, triton-lang/triton-windows#28, Zuntan03/EasyWan22#4",
            ((7, 0), (8, 0)),
            "note",
        )
        for package in ("triton", "triton-windows")
    ),
    Pair(
        {TORCH: "==2.8.*"},
        "RAM is reported to grow with each model that is switched to; 2.7.1 and 2.9.1 do not show it",
        "kijai/ComfyUI-WanVideoWrapper#1062, Haoming02/sd-webui-forge-classic#258",
        None,
        "note",
    ),
    Pair(
        {"sageattention": ">=2.2,<2.3", TORCH: "==2.9.0"},
        "the video is noise with this torch: take torch 2.9.1",
        "kijai/ComfyUI-WanVideoWrapper#1731",
    ),
    Pair(
        {"sageattention": ">=2.2,<2.3", TORCH: "==2.6.*"},
        "noise or CUDA errors are reported: take SageAttention 2.1.1 or 1.0.6, or a newer torch",
        "kijai/ComfyUI-WanVideoWrapper#1731, woct0rdho/SageAttention#46",
    ),
    Pair(
        {"sageattention": ">=2"},
        "it does not run on this card: SageAttention 1.0.6 is the last that does",
        "kijai/ComfyUI-WanVideoWrapper#717",
        ((7, 0), (8, 0)),
    ),
    Pair(
        {"comfy-aimdo": "<0.4.8"},
        "ComfyUI's dynamic VRAM may fail with `hostbuf_file_reader_read failed`: take 0.4.8 or newer",
        "Comfy-Org/ComfyUI#14239",
    ),
)


def check_versions(installed: Mapping[str, str], capability: tuple[int, int] | None) -> list[Finding]:
    """The pairs that these versions are.

    Args:
        installed: package -> version. capability: of the card; None without one.
    """
    findings = [
        Finding("versions", pair.state, f"{_named(pair, installed)}: {pair.says} ({pair.source})")
        for pair in PAIRS
        if _is(pair, installed, capability)
    ]
    sage = _sage_for_another_torch(installed)
    if sage:
        findings.append(Finding("versions", "warning", sage))
    return findings


def check_installed(capability: tuple[int, int] | None) -> list[Finding]:
    """`check_versions` of this Python, and packages that were compiled for another torch."""
    installed = {name: found for name in PACKAGES if (found := installed_version(name))}
    findings = check_versions(installed, capability)
    for name in BUILT_FOR_TORCH:
        for line in (requires(name) or ()) if installed_version(name) else ():
            if not fits_torch(line, installed.get(TORCH, "")):
                findings.append(
                    Finding(
                        "versions",
                        "warning",
                        f"{name} {installed_version(name)} was compiled for {line.partition(';')[0]}, and torch "
                        f"{installed.get(TORCH)} is installed: install the {name} of this torch "
                        "(yufu-wang/PromptHMR#4, yangjianxin1/Firefly#258)",
                    )
                )
    return findings or [Finding("versions", "ok", "none that are known to be bad together")]


def fits_torch(requirement: str, torch: str) -> bool:
    """Whether a line of a package's requirements is met by this torch; lines about others are."""
    wanted = Requirement(requirement)
    return wanted.name != TORCH or not torch or wanted.specifier.contains(torch, prereleases=True)


def _is(pair: Pair, installed: Mapping[str, str], capability: tuple[int, int] | None) -> bool:
    if pair.capability is not None:
        least, below = pair.capability
        if capability is None or not least <= capability < below:
            return False
    return all(_matches(installed.get(name, ""), specifier) for name, specifier in pair.versions.items())


def _matches(found: str, specifier: str) -> bool:
    """Without its local part: `2.9.0+cu128` is 2.9.0."""
    try:
        return bool(found) and SpecifierSet(specifier).contains(Version(found).public, prereleases=True)
    except InvalidVersion:
        return False


def _named(pair: Pair, installed: Mapping[str, str]) -> str:
    return " with ".join(f"{name} {installed[name]}" for name in reversed(list(pair.versions)))


def _sage_for_another_torch(installed: Mapping[str, str]) -> str:
    """Wheels of SageAttention 2 carry the torch that they were compiled for in their version.

    Source: woct0rdho/SageAttention#25; kijai/ComfyUI-WanVideoWrapper#2014 (black after the first frame);
    GKartist75/wan2gp-desktop#64 (out of memory with 21 GiB free).
    """
    found = re.search(r"torch(\d+\.\d+)", installed.get("sageattention", ""))
    torch = ".".join(installed.get(TORCH, "").split(".")[:2])
    if found is None or found[1] == torch:
        return ""
    return (
        f"sageattention {installed['sageattention']} was compiled for torch {found[1]}, and torch {torch} is "
        "installed: black frames, or out of memory with VRAM free, are reported; install the wheel of this torch "
        "(kijai/ComfyUI-WanVideoWrapper#2014, GKartist75/wan2gp-desktop#64)"
    )
