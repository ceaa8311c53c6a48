"""`wanfit inspect`: what a model file is, from its header; and whether two transformers make a pair."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..checkpoint import Identity
    from ..errors import WanFitError

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
        "checked as a pair (high, then low), a VAE or text encoder beside them against the transformer. Of a folder "
        "with several models each is named, and what is none. "
        "只读文件头，识别模型文件或文件夹，并检查它们是否匹配。",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help=".safetensors, .gguf or a folder / 模型文件或文件夹"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object / 输出 JSON")
    parser.set_defaults(run=run, words=WORDS)


def run(options: argparse.Namespace) -> int:
    from ..checkpoint import check_pair, check_parts, open_checkpoint
    from ..errors import CheckpointError, WanFitError
    from ..pipeline.files import files_inside

    found: list[tuple[Path, Identity]] = []
    refused: list[tuple[Path, WanFitError]] = []
    folders = False
    for path in options.files:
        try:
            with open_checkpoint(path) as checkpoint:
                found.append((path, checkpoint.identity))
        except CheckpointError:
            inside = [] if not path.is_dir() else [_identify(file) for file in files_inside(path)]
            known = [(file, identity) for file, identity in inside if not isinstance(identity, WanFitError)]
            if not known:
                raise
            found += known
            refused += [(file, error) for file, error in inside if isinstance(error, WanFitError)]
            folders = True
    if options.json:
        listed = [{"file": str(path), **identity.to_json()} for path, identity in found]
        listed += [{"file": str(path), "refused": error.render(WORDS)} for path, error in refused]
        print(json.dumps({"files": listed}, indent=2))
    else:
        for path, identity in found:
            print(f"{path.name}: {identity.describe()}")
        for path, error in refused:
            print(f"{path.name}: {error.render(WORDS)}")
    if folders:  # a collection need not fit together
        return 0
    identities = [identity for _, identity in found]
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


def _identify(path: Path) -> tuple[Path, Identity | WanFitError]:
    from ..checkpoint import open_checkpoint
    from ..errors import WanFitError

    try:
        with open_checkpoint(path) as checkpoint:
            return path, checkpoint.identity
    except WanFitError as error:
        return path, error
