"""What `wanfit plan` is asked about: the model's parts, the machine and the LoRAs that its options name."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..memory.machine import Machine
    from ..memory.parts import Model


def model_of(names: list[str]) -> tuple[Model, list[tuple[str, Path]], list[str]]:
    """The parts that `--model` names; what it does not name is taken as the community's usual file.

    Returns: the parts, the transformers' files with their roles (none for a preset), notices.
    """
    from ..checkpoint import check_pair, check_parts, open_checkpoint
    from ..errors import InputError
    from ..memory.parts import Model, TextPart, TransformerPart, VaePart, text_part, transformer_part, vae_part
    from ..memory.presets import text_preset, transformer_preset, vae_preset
    from ..pipeline.files import find_model

    paths = [Path(name) for name in names]
    if len(paths) == 1 and paths[0].is_dir() and not os.access(paths[0] / "config.json", os.F_OK):
        files = find_model(paths[0])
        names = [str(path) for path in (files.high, files.low, files.text_encoder, files.vae) if path is not None]
    transformers: list[TransformerPart] = []
    text: TextPart | None = None
    vae: VaePart | None = None
    identities: list[Any] = []
    experts: list[Path] = []
    notices: list[str] = []
    for name in names:
        if not Path(name).exists() and Path(name).suffix.lower() not in (".safetensors", ".gguf"):
            transformers.append(transformer_preset(name))
            continue
        with open_checkpoint(name) as checkpoint:
            if checkpoint.identity.kind == "transformer":
                transformers.append(transformer_part(checkpoint))
                identities.append(checkpoint.identity)
                experts.append(checkpoint.path)
            elif checkpoint.identity.kind == "vae":
                vae = vae_part(checkpoint)
            else:
                text = text_part(checkpoint)
            if checkpoint.identity.kind != "transformer" and identities:
                check_parts(
                    identities[0],
                    checkpoint.identity if checkpoint.identity.kind == "vae" else None,
                    checkpoint.identity if checkpoint.identity.kind == "text_encoder" else None,
                )
    if not transformers or len(transformers) > 2:
        raise InputError(
            "part_missing", "plan", f"<model> names {len(transformers)} transformers", "Give one, or a pair of experts"
        )
    if len(identities) == 2:
        check_pair(*sorted(identities, key=lambda identity: identity.expert == "low"))
    variant = transformers[0].variant
    model = Model(tuple(transformers), text or text_preset(), vae or vae_preset(_variant_vae(variant)))
    if len(transformers) == 1 and model.variant.has_experts:
        if identities:
            notices.append("one expert is given; the other is taken to be a file like it")
        model = Model((transformers[0], transformers[0]), model.text_encoder, model.vae)
    if text is None:
        notices.append(f"the text encoder is taken to be {model.text_encoder.name}")
    if len(experts) == 1 and len(model.transformers) == 2:
        experts *= 2
    roles = ("high", "low") if len(experts) == 2 else ("",)
    return model, list(zip(roles, experts, strict=False)), notices


def _variant_vae(variant: str) -> str:
    from ..checkpoint import VARIANTS

    return VARIANTS[variant].vae


def loras_of(texts: list[str], files: list[tuple[str, Path]], machine: Machine, notices: list[str]) -> tuple[int, int]:
    """Bytes of the LoRAs of the expert that has most of them, and of its largest block."""
    from ..errors import InputError
    from ..pipeline.loras import load_loras
    from .loras import read_lora

    if not texts:
        return 0, 0
    if not files:
        raise InputError(
            "lora_invalid", "plan", "<lora> is given and <model> is a name", "Give the model's file as <model>"
        )
    found = load_loras([read_lora(text) for text in texts], files)
    notices += found.notices
    return max((patch.nbytes(machine.dtype), patch.largest(machine.dtype)) for patch in found.patches)


def machine_of(options: argparse.Namespace) -> Machine:
    from dataclasses import replace
    from typing import get_args

    import psutil
    import torch

    from ..errors import InputError
    from ..memory.machine import GIB, Speeds, stated_machine, this_machine
    from ..offload import Policy

    for name in ("bandwidth", "block_ms", "disk"):
        value = getattr(options, name)
        if value is not None and not 0 < value < 1e6:
            key = "block_seconds" if name == "block_ms" else name
            raise InputError("number_invalid", "plan", f"<{key}> is {value}", "Use a number above 0")
    if options.policy not in get_args(Policy):
        raise InputError(
            "number_invalid", "plan", f"<policy> is {options.policy!r}", f"Use {', '.join(get_args(Policy))}"
        )
    speeds = None
    if options.bandwidth is not None:
        block = options.block_ms / 1e3 if options.block_ms is not None else None
        speeds = Speeds(options.bandwidth * 1e9, block, None if options.disk is None else options.disk * 1e9)
    if options.vram is None:
        if not torch.cuda.is_available():
            raise InputError(
                "part_missing",
                "plan",
                "this machine has no CUDA device and no <vram> is given",
                "Give <vram>, such as 12",
            )
        device = torch.device("cuda", torch.cuda.current_device())
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
        return replace(this_machine(device, dtype, dtype, policy=options.policy), speeds=speeds)
    ram = psutil.virtual_memory().total / GIB if options.ram is None else options.ram
    return stated_machine(
        options.vram,
        ram,
        used_gib=options.vram_used,
        capability=_capability(options.capability),
        policy=options.policy,
        speeds=speeds,
    )


def _capability(text: str | None) -> tuple[int, int] | None:
    from ..errors import InputError

    if text is None:
        return None
    major, _, minor = text.partition(".")
    if not (major.isdigit() and minor.isdigit()):
        raise InputError("number_invalid", "plan", f"<capability> is {text!r}", "Use two numbers, such as 8.6")
    return int(major), int(minor)
