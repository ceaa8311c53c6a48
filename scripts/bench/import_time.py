"""What importing costs beyond the bare interpreter: `import wanfit`, and the pack as ComfyUI loads it.

python scripts/dev.py bench import_time [--repeat N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BY_PATH = f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location(
    "wanfit_pack", r"{ROOT / "__init__.py"}", submodule_search_locations=[r"{ROOT}"])
module = importlib.util.module_from_spec(spec)
sys.modules["wanfit_pack"] = module
spec.loader.exec_module(module)
"""
CASES = {"interpreter": "pass", "import wanfit": "import wanfit", "pack by path": BY_PATH}
LIMIT_MS = 50


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    times: dict[str, list[float]] = {name: [] for name in CASES}
    for _ in range(options.repeat):
        for name, code in CASES.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", code], check=True)
            times[name].append(1000 * (time.perf_counter() - start))
    medians = {name: statistics.median(values) for name, values in times.items()}
    beyond = {name: medians[name] - medians["interpreter"] for name in CASES if name != "interpreter"}
    if options.json:
        print(json.dumps({"median_ms": medians, "beyond_interpreter_ms": beyond, "limit_ms": LIMIT_MS}))
    else:
        for name, value in beyond.items():
            print(f"{name}: {value:.1f} ms beyond the interpreter ({medians['interpreter']:.1f} ms); limit {LIMIT_MS}")
    return int(max(beyond.values()) > LIMIT_MS)


if __name__ == "__main__":
    raise SystemExit(main())
