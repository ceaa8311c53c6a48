"""The README's tables of one forward of the 14B transformer and of the VAE, from the files in docs/measurements.

python scripts/dev.py bench table          writes them between the README's markers
python scripts/dev.py bench table --check  ends with 1 when the README says something else
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README, MEASUREMENTS = ROOT / "README.md", ROOT / "docs" / "measurements"
BEGIN, END = "<!-- tables of scripts/bench/table.py -->\n", "<!-- end of the tables -->\n"
SIZES = {"480p": "832x480x81", "720p": "1280x720x81"}

CASES = {"480p": "832x480x81", "720p": "1280x720x81", "1088p": "1920x1088x81", "2.2": "VAE 2.2, 1280x704x121"}
GIB = 2**30


class Line(NamedTuple):
    """One line: its text, the runs that it takes, and what their rows must be."""

    text: str
    labels: tuple[str, ...]
    row: Mapping[str, str]
    memory: str = "allocated"


def _ours(layout: str, **more: str) -> dict[str, str]:
    return {"engine": "wanfit", "layout": layout} | more


_COMFY = {12: ("comfy_12gib_480p", "comfy_12gib_720p"), 8: ("comfy_8gib_720p",)}

LINES = (
    Line("diffusers, bf16, all on the card", ("diffusers_480p", "diffusers_720p"), {"engine": "diffusers resident"}),
    Line("diffusers, bf16, group offload with a stream", ("peers_group",), {"engine": "diffusers group"}),
    Line("diffusers, layerwise fp8 and group offload", ("peers_fp8",), {"engine": "diffusers fp8_group"}),
    Line("**WanFit**, fp8_scaled, stream", ("stream",), _ours("fp8_scaled")),
    Line("**WanFit**, fp8_scaled, stream, q, k, v packed in 8 bits", ("packed",), _ours("fp8_scaled")),
    Line("**WanFit**, fp8_scaled, all on the card", ("stream_resident_480p",), _ours("fp8_scaled", policy="resident")),
    Line("**WanFit**, GGUF Q4_K, stream", ("gguf",), _ours("q4_k")),
    Line("**WanFit**, bf16, stream", ("bf16_q4k_480p",), _ours("bf16")),
    Line("**WanFit**, fp8_scaled, two experts on a card with 8 GiB", ("card_8gib_two_experts",), _ours("fp8_scaled")),
    *(
        Line(
            f"{engine}, {name}, in ComfyUI 0.33.0 on a card with {gib} GiB",
            _COMFY[gib],
            {"engine": key, "layout": layout},
            "used",
        )
        for engine, key, layout, name, gib in (
            ("ComfyUI's own model", "ComfyUI", "fp8_scaled", "fp8_scaled", 12),
            ("**WanFit**", "WanFit in ComfyUI", "fp8_scaled", "fp8_scaled", 12),
            ("ComfyUI's own model", "ComfyUI", "fp8_scaled", "fp8_scaled", 8),
            ("**WanFit**", "WanFit in ComfyUI", "fp8_scaled", "fp8_scaled", 8),
            ("ComfyUI-GGUF", "ComfyUI-GGUF", "q4_k", "GGUF Q4_K", 12),
            ("**WanFit**", "WanFit in ComfyUI", "q4_k", "GGUF Q4_K", 12),
        )
    ),
)


def runs(folder: Path = MEASUREMENTS) -> dict[str, dict]:
    """All runs by label; the one of a later file wins."""
    files = (json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("dit_*.json")))
    return {run["label"]: run for file in files for run in file["runs"]}


def table(known: Mapping[str, dict]) -> str:
    """Seconds of one forward, and the most device memory that PyTorch had allocated; in ComfyUI: that was in use.

    A line that nothing was measured for is left out.
    """
    head = [f"| | {' | '.join(SIZES.values())} |", f"|---|{'---|' * len(SIZES)}"]
    return "\n".join(head + list(_lines(known))) + "\n"


def _lines(known: Mapping[str, dict]) -> Iterator[str]:
    for line in LINES:
        cells = [_cell(known, line, size) for size in SIZES]
        if any(cells):
            yield f"| {line.text} | {' | '.join(cells)} |"


def _cell(known: Mapping[str, dict], line: Line, size: str) -> str:
    for label in line.labels:
        run = known.get(label, {"rows": []})
        for row in run["rows"]:
            if row["size"] == size and all(row.get(key) == value for key, value in line.row.items()):
                if row.get("seconds") is None:
                    return row.get("failure", "failed").partition(":")[0]
                memory = row[line.memory] - run.get("held_by_benchmark_gib", 0.0)
                return f"{row['seconds']:.2f} s, {memory:.1f} GiB{' in use' if line.memory == 'used' else ''}"
    return ""


def passes(folder: Path = MEASUREMENTS) -> dict[tuple[str, str], dict]:
    """Decodes and encodes by how and case, ours by their budget; the last of a kind wins."""
    found: dict[tuple[str, str], dict] = {}
    for path in sorted(folder.glob("vae_h200_*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            budget = f" in {row['budget_bytes'] / GIB:.0f} GiB" if row.get("budget_bytes") else ""
            found[row["method"] + budget, row["case"]] = row
    return found


def vae_table(what: str, suffix: str, known: Mapping[tuple[str, str], dict]) -> str:
    """Seconds of a pass, and the most device memory allocated. What was not measured is left out."""
    ways = {
        "diffusers, untiled": f"diffusers{suffix}",
        "diffusers, tiled (another picture)": f"diffusers tiling{suffix}",
    } | {f"**WanFit** within {budget} GiB": f"wanfit{suffix} in {budget} GiB" for budget in (1, 2, 3, 4)}
    cases = [case for case in CASES if any((how, case) in known for how in ways.values())]
    lines = [f"| {what} | {' | '.join(CASES[case] for case in cases)} |", f"|---|{'---|' * len(cases)}"]
    for text, how in ways.items():
        cells = [_pass_cell(known.get((how, case))) for case in cases]
        if any(cells):
            lines.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _pass_cell(row: dict | None) -> str:
    return "" if row is None else f"{row['time_s']:.2f} s, {row['peak_bytes'] / GIB:.2f} GiB"


def all_tables() -> str:
    known = passes()
    return "\n".join([table(runs()), vae_table("decode", "", known), vae_table("encode", " encode", known)])


def replaced(text: str, made: str) -> str:
    """`text` with the tables between its markers."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"README.md lacks the markers {BEGIN.strip()} and {END.strip()}")
    return before + begin + made + end + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    text = README.read_text(encoding="utf-8")
    wanted = replaced(text, all_tables())
    if options.check:
        raise SystemExit(int(text != wanted))
    README.write_text(wanted, encoding="utf-8")
    print(all_tables())


if __name__ == "__main__":
    main()
