"""Runs a scenario mode by mode, and keeps of each what outlives its verdict.

One mode's forwards, verdict, determinism and diagnosis come before the next one's forwards, so that
the traces of one mode alone have to fit.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from actors.determinism import asks_last
from actors.idle_faults import acted_in
from actors.living import LivingScenario, diagnosed
from actors.rank_program import RankReport
from actors.resolve import ResolvedScenario
from actors.result_rows import ModeRun
from actors.sides import KeptSide, kept_side
from actors.world import RankStatus
from moe.trace import RankTrace
from reports.record import Mode
from reports.verdict.judge import Judge
from reports.verdict.twins import NUM_TWINS

Timing = Callable[[str], AbstractContextManager[None]]
"""Adds the wall time of a block to what its name was spent on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """What of a run outlives its verdict.

    traces  of all ranks
    sides   what another topology is compared with
    """

    traces: bool = True
    sides: bool = False


@dataclass(slots=True)
class JudgedModes:
    """What is known so far.

    runs   judged forwards, by mode
    sides  of the first round of each mode, where they are kept
    ranks  where each rank lives, once a forward came back
    """

    runs: dict[Mode, Sequence[ModeRun]] = field(default_factory=dict)
    sides: dict[Mode, KeptSide] = field(default_factory=dict)
    ranks: list[RankStatus] = field(default_factory=list)

    def in_order(self, modes: Iterable[str]) -> tuple[ModeRun, ...]:
        """Of all modes, in the order of the scenario."""
        return tuple(run for mode in modes for run in self.runs[Mode(mode)])


def judge_modes(
    living: LivingScenario, done: JudgedModes, timing: Timing, *, asks: bool, keep: Keep
) -> None:
    """Run and judge every mode; the one that is asked about determinism comes last.

    Args:
        living: the scenario.
        done: takes what is known, also of modes before one that ends the run.
        timing: for the seconds of a result.
        asks: ask about determinism and measure the noise of twins, too.
        keep: what is not to be dropped.

    Raises:
        WorldFailedError: a rank raised, died or hung.
        UnreadableTraceError: see ``LivingScenario.judged``.
    """
    modes = asks_last(living.modes)
    for at, mode in enumerate(modes):
        judge = living.judges[mode]
        with timing("ranks"):
            reports = living.forwards_of(mode)
        done.ranks[:] = living.world.ranks()
        with timing("golden and verdict"):
            rounds = living.judged_mode(mode, reports, judge, NUM_TWINS if asks else 0)
        del reports
        with timing("determinism"):
            if asks and mode == modes[-1]:
                before = [run for runs in done.runs.values() for run in runs]
                rounds = living.asked_mode(before, rounds, judge)
        with timing("diagnosis"):
            rounds = [*diagnosed(rounds, living.judges)]
        if keep.sides:
            done.sides[mode] = kept_side(judge, rounds[0])
        if not keep.traces:
            rounds = [without_traces(living.resolved, run) for run in rounds]
            _forget(judge, [living.judges[later] for later in modes[at + 1 :]])
        done.runs[mode] = rounds


def _forget(judge: Judge, still_needed: Sequence[Judge]) -> None:
    """Let go of the weights that a judge decoded, unless another mode has the same layer."""
    if judge not in still_needed:
        judge.forget_weights()


def without_traces(resolved: ResolvedScenario, run: ModeRun) -> ModeRun:
    """A judged forward whose traces are gone; which faults acted in it is noted before."""
    return replace(
        run,
        also_acted=run.also_acted | acted_in(resolved, run),
        reports=[_without_trace(report) for report in run.reports],
    )


def _without_trace(report: RankReport) -> RankReport:
    trace = RankTrace(rank=report.trace.rank, stages={})
    return replace(report, trace=trace, acted=frozenset())
