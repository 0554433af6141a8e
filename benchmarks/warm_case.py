"""A warm EP8 case on loopback: bare forward of all ranks, forward with verdict, driver's share.

    python -m benchmarks.warm_case [--runs 15] [SCENARIO]

Prints the median of each and, as ratios of one run, what the verdict and the driver cost beside
the forward and beside the same GEMMs alone. Budgets: forward <= 60 ms, one mode with golden, trace
and verdict <= 300 ms, driver's own share <= 10 ms, on 2 cores.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from actors.memory import keep_freed_memory
from actors.rank_program import RankReport
from actors.resolve import ResolvedScenario, resolve
from actors.results import ModeRun, RunFacts, judged_result
from actors.world import LoopbackRanks
from moe.formats import Stage
from reports.result import Mode
from reports.verdict.judge import Judge
from scenarios.inputs import deal, random_hidden_states
from scenarios.loader import LoadedScenario, load_scenario

SEGMENT = 128
DEFAULT = Path(__file__).parent.parent / "scenarios" / "ep8_dp.yaml"


@dataclass(frozen=True, slots=True, eq=False)
class WarmCase:
    """A scenario whose ranks and judge are alive, with weights loaded and decoded."""

    loaded: LoadedScenario
    resolved: ResolvedScenario
    ranks: LoopbackRanks
    judge: Judge
    hidden_states: Tensor

    @staticmethod
    def of(path: Path) -> "WarmCase":
        """Load the scenario and run it once."""
        loaded = load_scenario(path)
        resolved = resolve(loaded)
        case = WarmCase(
            loaded,
            resolved,
            LoopbackRanks(resolved.plan),
            Judge(resolved.judged),
            random_hidden_states(
                loaded.scenario.inputs.seed,
                sum(loaded.scenario.batch.tokens),
                loaded.model.hidden_size,
            ),
        )
        case.whole()
        return case

    def forward(self) -> list[RankReport]:
        """All ranks, one forward."""
        return self.ranks.forward(deal(self.hidden_states, self.resolved.plan.tokens), 60.0)

    def verdict(self, reports: Sequence[RankReport]) -> ModeRun:
        """Golden and verdict of one forward."""
        judgement = self.judge.judge(
            self.hidden_states, [r.trace for r in reports], [r.calls for r in reports]
        )
        return ModeRun(
            mode=Mode.RANDOM, hidden_states=self.hidden_states, reports=reports, judgement=judgement
        )

    def driver(self, run: ModeRun) -> None:
        """What is left: from the judgement to a result."""
        facts = RunFacts(loaded=self.loaded, resolved=self.resolved, seconds={}, reproduce="")
        judged_result(facts, [run], self.ranks.ranks())

    def whole(self) -> None:
        """One mode with golden, trace and verdict."""
        self.driver(self.verdict(self.forward()))

    def bare_gemms(self, reports: Sequence[RankReport]) -> Callable[[], None]:
        """The forward's grouped GEMMs and nothing else: fp32, one a segment of 128 rows."""
        shapes = []
        for report in reports:
            rows = report.trace[Stage.PRE_PERMUTE]["rows.m_indices"].shape[0]
            for name in ("w13", "w2"):
                _, n, k = report.trace[Stage.WEIGHTS][f"experts.{name}.values"].shape
                shapes += [(n, k)] * (rows // SEGMENT)
        operands = {(n, k): (torch.randn(SEGMENT, k), torch.randn(n, k)) for n, k in shapes}

        def multiply() -> None:
            for shape in shapes:
                lhs, rhs = operands[shape]
                torch.mm(lhs, rhs.t())

        return multiply


def median_ms(work: Callable[[], object], runs: int) -> float:
    """Median wall time in milliseconds."""
    seconds = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e3


def main() -> None:
    """Measure and print; the last line is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenario", nargs="?", type=Path, default=DEFAULT)
    parser.add_argument("--runs", type=int, default=15)
    arguments = parser.parse_args()
    keep_freed_memory()
    case = WarmCase.of(arguments.scenario)
    reports = case.forward()
    run = case.verdict(reports)
    runs = arguments.runs
    figures = {
        "bare_gemms_ms": median_ms(case.bare_gemms(reports), runs),
        "forward_ms": median_ms(case.forward, runs),
        "verdict_ms": median_ms(lambda: case.verdict(reports), runs),
        "driver_ms": median_ms(lambda: case.driver(run), runs),
        "whole_ms": median_ms(case.whole, runs),
    }
    figures["forward_over_gemms"] = figures["forward_ms"] / figures["bare_gemms_ms"]
    figures["whole_over_forward"] = figures["whole_ms"] / figures["forward_ms"]
    for name, value in figures.items():
        print(f"{name:22} {value:8.2f}")
    print(json.dumps({"threads": torch.get_num_threads(), "torch": torch.__version__, **figures}))


if __name__ == "__main__":
    main()
