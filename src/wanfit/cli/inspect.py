"""`wanfit inspect`: what a model file is, from its header; and whether two transformers make a pair."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

WORDS = {
    "transformer": "the first transformer",
    "transformer_2": "the second transformer",
    "vae": "the VAE",
    "text_encoder": "the text encoder",
}


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "inspect",
        help="say what model files are / 识别模型文件",
        description="Identify model files or folders from their headers; no weights are read. Two transformers are "
        "checked as a pair (high, then low), a VAE or text encoder beside them against the transformer.",
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help=".safetensors, .gguf or a diffusers folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run, words=WORDS)


def run(options: argparse.Namespace) -> int:
    from ..checkpoint import Identity, check_pair, check_parts, open_checkpoint

    identities: list[Identity] = []
    for path in options.files:
        with open_checkpoint(path) as checkpoint:
            identities.append(checkpoint.identity)
    if options.json:
        listed = [
            {"file": str(path), **identity.to_json()} for path, identity in zip(options.files, identities, strict=True)
        ]
        print(json.dumps({"files": listed}, indent=2))
    else:
        for path, identity in zip(options.files, identities, strict=True):
            print(f"{path.name}: {identity.describe()}")
    of_kind = {
        kind: [identity for identity in identities if identity.kind == kind]
        for kind in ("transformer", "vae", "text_encoder")
    }
    if len(of_kind["transformer"]) == 2:
        # The order on the command line says nothing here: the one known to be the low expert comes second.
        check_pair(*sorted(of_kind["transformer"], key=lambda identity: identity.expert == "low"))
    for transformer in of_kind["transformer"]:
        for vae in of_kind["vae"] or [None]:
            for text_encoder in of_kind["text_encoder"] or [None]:
                check_parts(transformer, vae, text_encoder)
    if len(identities) > 1 and not options.json:
        print("these files fit together")
    return 0
