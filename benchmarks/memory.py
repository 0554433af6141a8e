"""Memory of a run and its verdict, with all checks, extrapolated to a layer of DeepSeek V4's sizes.

    python -m benchmarks.memory [--divide 4] [--tokens 128 512]

The layer: eight ranks, attention DP x EP over deepep_normal, exact and random inputs; hidden size
4096, intermediate size 2048, 256 experts, top-6, 4,096 tokens in all. Everything is in one process,
so it holds what eight ranks would: prepared weights, traces, goldens and temporaries.

``--divide d`` divides both widths; every rank has one expert, since weights are read one expert
after the other. What is there for each token is d times
as much at full size; what is there for one matrix, or for the cells that are compared at once, is
d^2 times as much (limits are divided alike). The layer is run with two numbers of tokens, each in a
process of its own: the difference is what a token takes, the rest what a matrix takes.

Budget at full size: 8 GiB beside the weights that ranks hold. The last line is JSON.
"""

import argparse
import ctypes
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Self

import torch

from actors.by_mode import Keep
from actors.driver import run_scenario
from actors.memory import keep_freed_memory
from moe import grouped_gemm
from reports.verdict import certified_sums, golden_matrix, nominal_weights, route_values, weights
from scenarios import synthetic_weights
from scenarios.loader import load_scenario

ROOT = Path(__file__).parent.parent
SCENARIO = ROOT / "scenarios" / "ep8_dp.yaml"
SMALL = ROOT / "scenarios" / "smoke" / "ep2_dp.yaml"
HIDDEN, INTERMEDIATE, TOKENS, RANKS = 4096, 2048, 4096, 8
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
        f"model.overrides.n_routed_experts={RANKS}",
        f"batch.tokens={counts}",
    ]


def divide_limits(divide: int) -> None:
    """Let a divided run split what the whole one would.

    That one keeps no decoded expert and no drawn matrix, and asks no topology that one rank has all
    experts on.
    """
    route_values.CELLS_AT_ONCE //= divide**2
    grouped_gemm.CACHED_MATRIX_BYTES = 0
    nominal_weights.CACHED_BYTES //= divide**2
    certified_sums.BLOCK_BYTES //= divide**2
    golden_matrix.BYTES_AT_ONCE //= divide**2
    synthetic_weights.KEPT_ELEMENTS //= divide**2
    synthetic_weights.KEPT_EXPERTS_ELEMENTS //= divide**2
    weights.CACHED_BYTES = 0


_NAMES = (
    *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
    *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
)


class _Mallinfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` gives."""

    _fields_ = [(name, ctypes.c_size_t) for name in _NAMES]


class LiveBytes:
    """The most that was allocated and not yet freed while a block ran, sampled every 2 ms.

    Resident memory has what the C library keeps for the next tensor, which differs by more from one
    run to the next than a few hundred tokens take.
    """

    def __init__(self) -> None:
        self._mallinfo = ctypes.CDLL(None).mallinfo2
        self._mallinfo.restype = _Mallinfo
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.before = self.peak = self._now()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._now())

    def _now(self) -> int:
        found = self._mallinfo()
        return int(found.uordblks + found.hblkhd)


def measure(divide: int, tokens: int) -> dict[str, int]:
    """Bytes that one run takes at most, beside what any run takes; and without its weights."""
    keep_freed_memory()
    run_scenario(load_scenario(SMALL, overrides=[LOOPBACK, "inputs.modes=[exact, random]"]))
    divide_limits(divide)
    loaded = load_scenario(SCENARIO, overrides=settings(divide, tokens))
    with LiveBytes() as live:
        result = run_scenario(loaded, keep=Keep(traces=False)).result
    print(result.summary, file=sys.stderr)
    peak = live.peak - live.before
    matrices = 3 * (HIDDEN // divide) * (INTERMEDIATE // divide)  # a byte a code
    held = len(loaded.scenario.inputs.modes) * (RANKS + RANKS) * matrices  # routed, and shared ones
    return {"peak": peak, "beside": peak - held}


def in_process_of_its_own(divide: int, tokens: int) -> dict[str, int]:
    """``measure``, with nothing left of an earlier one."""
    given = ["--divide", str(divide), "--one", str(tokens)]
    command = [sys.executable, "-m", "benchmarks.memory", *given]
    done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    sizes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return sizes


def extrapolated(divide: int, sizes: dict[int, dict[str, int]]) -> dict[str, float]:
    """GiB at full size: what the tokens take, what matrices and blocks of cells do, and both."""
    (few, fewer), (many, more) = sorted(sizes.items())
    of_a_token = (more["beside"] - fewer["beside"]) / (many - few)
    rest = fewer["beside"] - of_a_token * few
    parts = {"tokens": of_a_token * TOKENS * divide, "matrices": rest * divide**2}
    parts["all"] = sum(parts.values())
    return {part: round(size / GIB, 2) for part, size in parts.items()}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--divide", type=int, default=4)
    parser.add_argument("--tokens", type=int, nargs=2, default=[128, 512])
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
        "beside_weights_gib": extrapolated(divide, sizes),
        "wall_s": round(time.perf_counter() - start, 1),
        "torch": torch.__version__,
        "date": time.strftime("%F"),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
