"""Cold start: a whole scenario as a process, against the least that eight Ray ranks can cost.

``python -m benchmarks.cold_start [--runs N]`` runs both in turn, prints the medians and their
ratio, and as its last line JSON. Memory is measured in one more run, for sampling costs time.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SCENARIO = "scenarios/ep8_dp.yaml"
BUDGET = 1.3
SAMPLE_S = 0.1

PEER = """
import os
import ray
import torch.distributed as dist

WORLD_SIZE = 8


class Rank:
    def join(self, rank, port):
        import torch
        import torch.distributed as dist
        torch.set_num_threads(1)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD_SIZE)
        dist.barrier()


cores = min(WORLD_SIZE, os.cpu_count())
ray.init(num_cpus=cores, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
actor = ray.remote(Rank).options(num_cpus=0)
ranks = [actor.remote() for _ in range(WORLD_SIZE)]
ray.get([one.join.remote(rank, store.port) for rank, one in enumerate(ranks)], timeout=300)
ray.shutdown()
"""
"""ray.init, eight actors that import torch, one gloo group, one barrier."""


def main(arguments: Sequence[str]) -> None:
    """Measure, print, and leave JSON on the last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args(arguments).runs
    ours_s, peer_s = [], []
    with tempfile.TemporaryDirectory() as folder:
        ours, peer = _commands(Path(folder))
        for number in range(runs):
            peer_s.append(_wall_seconds(peer))
            ours_s.append(_wall_seconds(ours))
            print(f"run {number + 1}: scenario {ours_s[-1]:.2f} s, bare ranks {peer_s[-1]:.2f} s")
        peak_bytes = _peak_memory(ours)
    report = _report(ours_s, peer_s, peak_bytes)
    print(
        f"median: scenario {report['scenario_s']:.2f} s, bare ranks {report['peer_s']:.2f} s, "
        f"ratio {report['ratio']:.2f} (budget {BUDGET}); peak {peak_bytes / 2**30:.2f} GiB PSS"
    )
    print(json.dumps(report))


def _commands(folder: Path) -> tuple[list[str], list[str]]:
    out = str(folder / "out")
    ours = [sys.executable, "run.py", SCENARIO, "--out", out, "--quiet"]
    return ours, [sys.executable, "-c", PEER]


def _wall_seconds(command: Sequence[str]) -> float:
    """From start to exit of a process that must succeed."""
    start = time.perf_counter()
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def _peak_memory(command: Sequence[str]) -> int:
    """Largest sum of PSS over the process and all it started, in bytes, sampled every 100 ms.

    PSS counts a page that n processes share as 1/n of a page in each.
    """
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peak = 0
    while process.poll() is None:
        peak = max(peak, sum(_pss(pid) for pid in _tree(process.pid)))
        time.sleep(SAMPLE_S)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return peak


def _tree(root: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children[_parent(entry)].append(int(entry.name))
    found = [root]
    for pid in found:
        found += children[pid]
    return found


def _parent(entry: Path) -> int:
    """Parent of a process by its folder in /proc; 0 if it has just ended."""
    try:
        return int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _pss(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _report(ours_s: list[float], peer_s: list[float], peak_bytes: int) -> dict[str, Any]:
    ours, peer = statistics.median(ours_s), statistics.median(peer_s)
    return {
        "benchmark": "cold_start",
        "scenario": SCENARIO,
        "scenario_s": round(ours, 3),
        "peer_s": round(peer, 3),
        "ratio": round(ours / peer, 3),
        "budget_ratio": BUDGET,
        "scenario_runs_s": [round(one, 3) for one in ours_s],
        "peer_runs_s": [round(one, 3) for one in peer_s],
        "peak_pss_bytes": peak_bytes,
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "ray")},
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


if __name__ == "__main__":
    main(sys.argv[1:])
