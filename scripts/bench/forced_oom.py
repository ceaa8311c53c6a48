"""What `wanfit generate` says when memory is taken away as a stage begins, for each stage.

    python scripts/dev.py bench forced_oom                  tiny models; on the card where there is one, else the CPU
    python scripts/dev.py bench forced_oom --stage "decode and save"

On a card PyTorch may take no more than it has at that moment (`set_per_process_memory_fraction`); on the CPU, Linux
only, the process may map no more (`RLIMIT_AS`) than it has and `--room`; with MALLOC_MMAP_THRESHOLD_=65536 in the
environment tensors come from the system there, not from heap that was freed before.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from pathlib import Path

import psutil
import torch

from wanfit.cli.words import FLAGS
from wanfit.errors import WanFitError, in_words
from wanfit.pipeline.files import find_model
from wanfit.pipeline.generate import generate
from wanfit.pipeline.placement import choose_placement
from wanfit.pipeline.request import Request
from wanfit.tiny.models import write_tiny_models

STAGES = ("text", "encode image", "denoise high", "denoise low", "decode and save")
MIB = 2**20


def limit(room: int | None) -> None:
    """To what is taken now and `room` bytes; None: as at the start."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(
            1.0 if room is None else (torch.cuda.memory_reserved() + room) / total
        )
        return
    import resource

    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = hard if room is None else psutil.Process().memory_info().vms + room
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def run(folder: Path, stage: str, room: int, size: tuple[int, int, int]) -> str:
    """The message of a run whose memory ends where `stage` begins."""
    placement = choose_placement()
    image = Path(__file__).resolve().parents[2] / "assets" / "boat.jpg"
    width, height, frames = size
    request = Request(
        prompt="a boat", image=image, width=width, height=height, num_frames=frames, steps=2, out=folder / "boat.mp4"
    )

    def tell(text: str) -> None:
        if text == f"stage: {stage}":
            limit(room)

    try:
        generate(find_model(folder), request, placement, tell=tell)
    except WanFitError as error:
        return in_words(str(error), FLAGS)
    finally:
        limit(None)
    return "ran to the end"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=STAGES, default=STAGES)
    parser.add_argument("--room", type=int, default=0, metavar="MIB", help="left when the stage begins")
    parser.add_argument("--size", type=int, nargs=3, default=(832, 480, 17), metavar=("WIDTH", "HEIGHT", "FRAMES"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_tiny_models(Path(name))
        for stage in options.stage:
            print(f"{stage}:\n    {run(Path(name), stage, options.room * MIB, tuple(options.size))}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
