"""How long `import auto_deploy_ext` takes beside `import torch` alone: interleaved fresh processes, medians.

    python benchmarks/import_time.py --json benchmarks/results/import_time.json

Exits with 1 when the ratio is not below the limit.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from pathlib import Path

MODULES = ("torch", "auto_deploy_ext")
LIMIT = 1.5

PROGRAM = """
import sys, time
begin = time.perf_counter()
__import__(sys.argv[1])
print(time.perf_counter() - begin, "transformers" in sys.modules)
"""


def measure(module: str) -> float:
    """Seconds that one fresh process, bound to the embedded host, needs for the import alone."""
    environment = os.environ | {"AUTO_DEPLOY_EXT_HOST": "embedded", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, module], env=environment, capture_output=True, text=True, check=True
    )
    seconds, transformers = done.stdout.split()
    assert transformers == "False", f"import {module} imports transformers"
    return float(seconds)


def main() -> int:
    """Measure, print and record."""
    import torch

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=15, help="processes per module (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the result there")
    arguments = parser.parse_args()
    for module in MODULES:
        measure(module)  # fills the file cache
    times: dict[str, list[float]] = {module: [] for module in MODULES}
    for _ in range(arguments.repeats):
        for module in MODULES:
            times[module].append(measure(module))
    medians = {module: statistics.median(values) for module, values in times.items()}
    ratio = medians["auto_deploy_ext"] / medians["torch"]
    result = {
        "median_seconds": {module: round(value, 4) for module, value in medians.items()},
        "ratio": round(ratio, 3),
        "limit": LIMIT,
        "repeats": arguments.repeats,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    print(json.dumps(result, indent=2))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if ratio < LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
