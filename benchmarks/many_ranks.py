"""A world of hundreds of ranks in one process: wall time and memory of the whole command.

    python -m benchmarks.many_ranks [SCENARIO]

Runs ``run.py`` on loopback in a process of its own and prints what it took; the last line is
JSON. Budget for 256 ranks at the default scenario's sizes, on 2 cores: 60 s and 8 GiB.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
DEFAULT = ROOT / "scenarios" / "ep256_dp.yaml"


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", nargs="?", type=Path, default=DEFAULT)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "run.py"), str(arguments.scenario.resolve())]
        start = time.perf_counter()
        done = subprocess.run(
            [*command, "--runtime", "loopback", "--out", folder, "--quiet"],
            check=True,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        wall_s = time.perf_counter() - start
        result = json.loads((Path(folder) / "result.json").read_text(encoding="utf-8"))
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    print(done.stdout.strip())
    facts = {
        "scenario": result["name"],
        "ranks": len(result["ranks"]),
        "wall_s": round(wall_s, 1),
        "peak_gib": round(peak_kib / (1 << 20), 2),
        "seconds": {name: round(spent, 1) for name, spent in result["timing"].items()},
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
