"""Memory of a run and its verdict on loopback, split into weights and the rest.

    python -m benchmarks.memory [--divide 2] [--threads 1]

A layer of DeepSeek V4's sizes on eight ranks, attention DP x EP over deepep_normal: hidden size
4096, intermediate size 2048, 256 experts, top-6, 4,096 tokens in all. ``--divide 2`` halves both
widths and quarters experts and tokens: an eighth of the stage tensors, a sixteenth of the weights.
What a verdict compares or keeps at once is divided alike, so that it is split as at full size.
Everything runs in this process, so it holds what eight ranks would: all prepared weights, all
traces, goldens and temporaries.

Budget at full size: 8 GiB for all but the weights. Prints the result's line; the last line is JSON.
"""

import argparse
import json
import os
import resource
import time
from pathlib import Path

import torch

from actors.driver import Outcome, run_scenario
from actors.memory import keep_freed_memory
from moe.formats import Stage
from reports.verdict import route_values, weights
from scenarios.loader import load_scenario

SCENARIO = Path(__file__).parent.parent / "scenarios" / "ep8_dp.yaml"
EXPERTS, TOKENS, RANKS = 256, 4096, 8
GIB = 1 << 30


def settings(divide: int) -> list[str]:
    """Of the scenario, divided; token counts differ by rank."""
    mean = TOKENS // RANKS // divide**2
    tokens = [mean + mean // 16 * (2 * rank - RANKS + 1) for rank in range(RANKS)]
    return [
        "run.runtime=loopback",
        f"model.overrides.hidden_size={4096 // divide}",
        f"model.overrides.moe_intermediate_size={2048 // divide}",
        f"model.overrides.n_routed_experts={EXPERTS // divide**2}",
        f"batch.tokens={tokens}",
    ]


def divide_limits(divide: int) -> None:
    """Let a divided run split and keep what the whole one would."""
    route_values.CELLS_AT_ONCE //= divide**3
    weights.CACHED_BYTES //= divide**4


def peak_bytes() -> int:
    """The most that this process ever had in memory."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def traced_bytes(outcome: Outcome) -> dict[str, int]:
    """Bytes of the ranks' prepared weights, and of all other traced tensors, each storage once."""
    seen: dict[str, dict[int, int]] = {"weights": {}, "stages": {}}
    for run in outcome.runs:
        for report in run.reports:
            for stage, named in report.trace.stages.items():
                kind = "weights" if stage is Stage.WEIGHTS else "stages"
                for tensor in named.values():
                    storage = tensor.untyped_storage()
                    seen[kind][storage.data_ptr()] = storage.nbytes()
    return {kind: sum(sizes.values()) for kind, sizes in seen.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--divide", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    divide_limits(arguments.divide)
    keep_freed_memory()
    before = peak_bytes()
    start = time.perf_counter()
    outcome = run_scenario(load_scenario(SCENARIO, overrides=settings(arguments.divide)))
    wall_s = time.perf_counter() - start
    print(outcome.result.summary)
    peak, traced = peak_bytes(), traced_bytes(outcome)
    sizes = {
        "before": before,
        "peak": peak,
        "weights": traced["weights"],
        "stage_tensors": traced["stages"],
        "beside_weights": peak - before - traced["weights"],
    }
    facts = {"divide": arguments.divide, "verdict": outcome.result.verdict}
    machine = {"cores": os.cpu_count(), "torch": torch.__version__, "date": time.strftime("%F")}
    gib = {f"{name}_gib": round(size / GIB, 2) for name, size in sizes.items()}
    seconds = {name: round(spent, 1) for name, spent in outcome.result.timing.items()}
    print(json.dumps({**facts, **gib, "wall_s": round(wall_s, 1), "seconds": seconds, **machine}))


if __name__ == "__main__":
    main()
