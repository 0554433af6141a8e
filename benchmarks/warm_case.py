"""A warm EP8 case on loopback: bare forward of all ranks, forward with verdict, driver's share.

    python -m benchmarks.warm_case [--runs 15] [SCENARIO]

Prints median and least time of each and, as ratios of one run, what verdict and driver cost beside
the forward and beside the same GEMMs alone. Budgets: forward <= 60 ms, one mode with golden, trace
and verdict <= 300 ms, driver's own share <= 10 ms, on 2 cores.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch

from actors.build import build_layer, load_layer, rank_weights
from actors.dispatchers import dispatch_buffers
from actors.memory import keep_freed_memory
from actors.rank_program import RankReport
from actors.resolve import ResolvedScenario, resolve
from actors.result_rows import ModeRun
from actors.results import RunFacts, judged_result
from actors.world import LoopbackRanks
from moe.batch import Batch, LayerInput
from moe.formats import Stage
from moe.grouped_gemm import TorchGemm
from reports.result import Mode
from reports.verdict.judge import Judge
from scenarios.batches import batch_of
from scenarios.inputs import deal
from scenarios.loader import LoadedScenario, load_scenario
from topology.collectives import Collectives
from topology.loopback import LoopbackWorld

V = TypeVar("V")

SEGMENT = 128
DEFAULT = Path(__file__).parent.parent / "scenarios" / "ep8_dp.yaml"


@dataclass(frozen=True, slots=True, eq=False)
class WarmCase:
    """A scenario whose ranks and judge are alive, with weights loaded and decoded."""

    loaded: LoadedScenario
    resolved: ResolvedScenario
    ranks: LoopbackRanks
    judge: Judge
    batch: Batch

    @staticmethod
    def of(path: Path) -> "WarmCase":
        """Load the scenario and run it once."""
        loaded = load_scenario(path)
        resolved = resolve(loaded)
        layer = resolved.layers[Mode.RANDOM]
        case = WarmCase(
            loaded,
            replace(resolved, layers={Mode.RANDOM: layer}),
            LoopbackRanks(layer.plan),
            Judge(layer.judged),
            batch_of(loaded, Mode.RANDOM),
        )
        case.whole()
        return case

    def bare_forward(self) -> Callable[[], object]:
        """All ranks, one forward, without taps, faults, progress or records."""
        plan, gemm = self.resolved.plan, TorchGemm()
        loaded = [load_layer(gemm, rank_weights(plan, rank)) for rank in plan.layout.world]
        given = self.dealt()

        def program(verbs: Collectives) -> None:
            layer = build_layer(plan, verbs, gemm, loaded[verbs.rank], dispatch_buffers(plan))
            layer.forward(given[verbs.rank], untapped)

        world = LoopbackWorld(plan.layout.world_size)
        return lambda: world.run(program)

    def forward(self) -> list[RankReport]:
        """All ranks, one forward, traced."""
        return self.ranks.forward(self.dealt(), 60.0)

    def dealt(self) -> list[LayerInput]:
        """What each rank is handed."""
        plan = self.resolved.plan
        return deal(self.batch, plan.sync, plan.seed)

    def verdict(self, reports: Sequence[RankReport]) -> ModeRun:
        """Golden and verdict of one forward."""
        judgement = self.judge.judge(
            self.batch, [r.trace for r in reports], [r.calls for r in reports]
        )
        return ModeRun(mode=Mode.RANDOM, batch=self.batch, reports=reports, judgement=judgement)

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


def untapped(stage: Stage, value: V) -> V:
    """The tap of a bare forward."""
    return value


@dataclass(frozen=True, slots=True)
class Timing:
    """Wall times of one piece of work, in milliseconds; noise of a shared machine only adds."""

    median_ms: float
    least_ms: float


def timed(work: Callable[[], object], runs: int) -> Timing:
    """Do the work ``runs`` times."""
    spent = []
    for _ in range(runs):
        start = time.perf_counter()
        work()
        spent.append((time.perf_counter() - start) * 1e3)
    return Timing(median_ms=statistics.median(spent), least_ms=min(spent))


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
    timings = {
        "bare_gemms": timed(case.bare_gemms(reports), runs),
        "bare_forward": timed(case.bare_forward(), runs),
        "traced_forward": timed(case.forward, runs),
        "verdict": timed(lambda: case.verdict(reports), runs),
        "driver": timed(lambda: case.driver(run), runs),
        "whole": timed(case.whole, runs),
    }
    forward = timings["bare_forward"].median_ms
    ratios = {
        "forward_over_gemms": forward / timings["bare_gemms"].median_ms,
        "traced_over_bare": timings["traced_forward"].median_ms / forward,
        "whole_over_forward": timings["whole"].median_ms / forward,
    }
    for name, timing in timings.items():
        print(f"{name:20} median {timing.median_ms:8.2f} ms  least {timing.least_ms:8.2f} ms")
    for name, ratio in ratios.items():
        print(f"{name:20} {ratio:8.2f}")
    machine = {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    facts = {**machine, "torch": torch.__version__, "date": time.strftime("%Y-%m-%d")}
    print(json.dumps({**facts, **{n: asdict(t) for n, t in timings.items()}, **ratios}))


if __name__ == "__main__":
    main()
