"""Memory of a run and its verdict, with all checks, extrapolated to a layer of DeepSeek V4's sizes.

    python -m benchmarks.memory [--divide 4] [--tokens 128 384]

The layer: eight ranks, attention DP x EP over deepep_normal, exact and random inputs; hidden size
7168, intermediate size 2048, 256 experts, top-6, 4,096 tokens in all. Everything is in one process,
so it holds what eight ranks would: prepared weights, traces, goldens and temporaries.

``--divide d`` divides both widths, and the experts by d^2. What is there for each token is d times
as much at full size; what is there for one matrix, or for the cells that are compared at once, is
d^2 times as much (limits are divided alike). The layer is run with two numbers of tokens, each in a
process of its own: the difference is what a token takes, the rest what a matrix takes.

Budget at full size: 8 GiB beside the weights that ranks hold. The last line is JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import torch

from actors.by_mode import Keep
from actors.driver import Outcome, run_scenario
from actors.memory import keep_freed_memory
from moe.formats import Stage
from reports.verdict import nominal_weights, route_values, weights
from scenarios.loader import load_scenario

ROOT = Path(__file__).parent.parent
SCENARIO = ROOT / "scenarios" / "ep8_dp.yaml"
SMALL = ROOT / "scenarios" / "smoke" / "ep2_dp.yaml"
HIDDEN, INTERMEDIATE, EXPERTS, TOKENS, RANKS = 7168, 2048, 256, 4096, 8
LOOPBACK = "run.runtime=loopback"
GIB = 1 << 30


def settings(divide: int, tokens: int) -> list[str]:
    """Of the scenario, divided; token counts differ by rank."""
    mean = tokens // RANKS
    counts = [mean + mean // 16 * (2 * rank - RANKS + 1) for rank in range(RANKS)]
    return [
        LOOPBACK,
        f"model.overrides.hidden_size={HIDDEN // divide}",
        f"model.overrides.moe_intermediate_size={INTERMEDIATE // divide}",
        f"model.overrides.n_routed_experts={EXPERTS // divide**2}",
        f"batch.tokens={counts}",
    ]


def divide_limits(divide: int) -> None:
    """Let a divided run split what the whole one would; that one keeps no decoded expert."""
    route_values.CELLS_AT_ONCE //= divide**2
    nominal_weights.CACHED_BYTES //= divide**2
    weights.CACHED_BYTES = 0


def resident_bytes(name: str) -> int:
    """``VmRSS``, what this process has in memory, or ``VmHWM``, the most it had."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return int(line.split()[1]) << 10


def traced_bytes(outcome: Outcome) -> dict[str, int]:
    """Bytes of the ranks' prepared weights, and of a mode's other tensors, each storage once."""
    seen: dict[str, dict[int, int]] = {"weights": {}, "stages": {}}
    for report in outcome.runs[0].reports:
        for stage, named in report.trace.stages.items():
            kind = "weights" if stage is Stage.WEIGHTS else "stages"
            for tensor in named.values():
                storage = tensor.untyped_storage()
                seen[kind][storage.data_ptr()] = storage.nbytes()
    return {kind: sum(sizes.values()) for kind, sizes in seen.items()}


def measure(divide: int, tokens: int) -> dict[str, int]:
    """Bytes that one run takes at most, beside what any run takes."""
    keep_freed_memory()
    run_scenario(load_scenario(SMALL, overrides=[LOOPBACK, "inputs.modes=[exact, random]"]))
    before = resident_bytes("VmRSS")
    divide_limits(divide)
    loaded = load_scenario(SCENARIO, overrides=settings(divide, tokens))
    outcome = run_scenario(loaded, keep=Keep(traces=False))
    print(outcome.result.summary, file=sys.stderr)
    peak = resident_bytes("VmHWM") - before
    modes = loaded.scenario.inputs.modes
    one_mode = run_scenario(
        load_scenario(SCENARIO, overrides=[*settings(divide, tokens), "inputs.modes=[random]"]),
        asks=False,
    )
    traced = traced_bytes(one_mode)
    held = traced["weights"] * len(modes)
    return {"peak": peak, "weights": held, "stages": traced["stages"], "beside": peak - held}


def in_process_of_its_own(divide: int, tokens: int) -> dict[str, int]:
    """``measure``, with nothing left of an earlier one."""
    command = [
        sys.executable,
        "-m",
        "benchmarks.memory",
        "--divide",
        str(divide),
        "--one",
        str(tokens),
    ]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    sizes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return sizes


def extrapolated(divide: int, sizes: dict[int, dict[str, int]], name: str) -> dict[str, float]:
    """GiB at full size: what the tokens take, what matrices and blocks of cells do, and both."""
    (few, fewer), (many, more) = sorted(sizes.items())
    of_a_token = (more[name] - fewer[name]) / (many - few)
    rest = fewer[name] - of_a_token * few
    parts = {"tokens": of_a_token * TOKENS * divide, "matrices": max(rest, 0) * divide**2}
    return {
        part: round(size / GIB, 2) for part, size in (parts | {"all": sum(parts.values())}).items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--divide", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs=2, default=[128, 384])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", type=int, help="measure one number of tokens in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    divide = arguments.divide
    if arguments.one is not None:
        print(json.dumps(measure(divide, arguments.one)))
        return
    start = time.perf_counter()
    sizes = {tokens: in_process_of_its_own(divide, tokens) for tokens in arguments.tokens}
    facts = {
        "divide": divide,
        "mib": {
            str(tokens): {name: size >> 20 for name, size in by_name.items()}
            for tokens, by_name in sizes.items()
        },
        "beside_weights_gib": extrapolated(divide, sizes, "beside"),
        "stages_of_a_mode_gib": extrapolated(divide, sizes, "stages"),
        "wall_s": round(time.perf_counter() - start, 1),
        "torch": torch.__version__,
        "date": time.strftime("%F"),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
