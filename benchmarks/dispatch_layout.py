"""The whole sweep of dispatchers and layouts: how many rows agree, and how long that takes.

    python -m benchmarks.dispatch_layout [--out DIR] [--threads 1]

Runs every legal row of scenarios/sweeps/dispatch_layout.yaml on loopback, pages included. Prints
those that do not agree; the last line is JSON.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from actors.dry_run import expected_seconds
from actors.save_tensors import SaveTensors
from actors.session import Session
from actors.sweep import run_sweep
from reports.sweep_result import SweepResult
from scenarios.sweep import ExpandedSweep, load_path

SWEEP = Path(__file__).parent.parent / "scenarios" / "sweeps" / "dispatch_layout.yaml"


def seconds_by(axis: str, result: SweepResult) -> dict[str, float]:
    """Seconds of the rows of each value of an axis."""
    spent = dict.fromkeys(result.axes[axis], 0.0)
    for row in result.rows:
        spent[row.values[axis]] += row.seconds
    return {name: round(seconds, 1) for name, seconds in spent.items()}


def facts(expanded: ExpandedSweep, result: SweepResult) -> dict[str, Any]:
    """What is worth keeping of one run."""
    slowest = max(result.rows, key=lambda row: row.seconds)
    expected = sum(expected_seconds(loaded) for _, loaded in expanded.legal)
    return {
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "rows": expanded.num_rows,
        "legal": len(expanded.legal),
        "counts": result.counts,
        "not_agreeing": [row.name for row in result.rows if row.verdict != "agree"],
        "refused_by": {rule.name: rule.rows for rule in result.rules},
        "seconds": result.seconds,
        "expected_seconds": round(expected, 1),
        "slowest": {"row": slowest.name, "seconds": slowest.seconds},
        "seconds_by_topology": seconds_by("topology", result),
        "seconds_by_dispatcher": seconds_by("moe.dispatcher", result),
    }


def main() -> None:
    """Run everything and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="keep the results there")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    expanded = load_path(SWEEP)
    assert isinstance(expanded, ExpandedSweep)
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.out or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        session = Session(save_tensors=SaveTensors.NONE)
        result = run_sweep(expanded, folder, session, lambda line: None)
    for row in result.rows:
        if row.verdict != "agree":
            print(f"{row.name}: {row.summary}")
    print(json.dumps(facts(expanded, result)))


if __name__ == "__main__":
    main()
