"""One scenario end to end: ranks, traces, verdict, result."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from actors.by_mode import JudgedModes, Keep, judge_modes
from actors.determinism import asks_last
from actors.expected import check_expected
from actors.kept import KeptWork, WatchedRanks
from actors.living import LivingScenario, diagnosed, rounds_of
from actors.machine import computing_on
from actors.rank_program import RankReport
from actors.resolve import ResolvedScenario, arm_faults, reasons_not_to_run, resolve
from actors.result_rows import CHECKS, ModeRun
from actors.results import (
    RunFacts,
    failed_result,
    judged_result,
    unreadable_result,
    unsupported_result,
)
from actors.sides import KeptSide
from actors.world import LoopbackRanks, World, WorldFailedError
from moe.faults import blinded_checks
from reports.result import Mode, Result
from reports.verdict.judge import Judge
from reports.verdict.readable import UnreadableTraceError
from reports.verdict.twins import NUM_TWINS
from scenarios.batches import batch_of
from scenarios.errors import Problem, ScenarioError
from scenarios.loader import LoadedScenario
from scenarios.schema import RunSpec


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Outcome:
    """A result, and what is behind it: empty unless every rank came back.

    runs      judged forwards
    judges    theirs, by mode
    sides     what comparisons take of each mode, where they are kept
    forwards  every one, where work is kept
    """

    result: Result
    runs: tuple[ModeRun, ...] = ()
    judges: Mapping[str, Judge] = field(default_factory=dict)
    sides: Mapping[Mode, KeptSide] = field(default_factory=dict)
    forwards: tuple[Sequence[RankReport], ...] = ()


def check_input(loaded: LoadedScenario) -> None:
    """Find out what is wrong with a scenario before anything runs.

    Raises:
        UserError: faults, weights or captured inputs that do not exist or do not fit.
    """
    check_expected(loaded)
    unknown = sorted(blinded_checks(arm_faults(loaded)) - CHECKS.keys())
    if unknown:
        known = ", ".join(map(repr, CHECKS))
        problem = Problem("inject", f"no check {', '.join(unknown)}; known: {known}")
        raise ScenarioError(str(loaded.path), [problem])
    if not reasons_not_to_run(loaded):
        resolve(loaded)
        for mode in loaded.scenario.inputs.modes:
            if mode == "file" or loaded.stored is not None:
                batch_of(loaded, mode)


@dataclass(slots=True)
class Stopwatch:
    """Seconds by what they were spent on."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        """Add the wall time of the block to ``name``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - start
            self.seconds[name] = self.seconds.get(name, 0.0) + spent


def run_scenario(
    loaded: LoadedScenario,
    *,
    address: str | None = None,
    reproduce: str = "",
    kept: KeptWork | None = None,
    asks: bool = True,
    keep: Keep = Keep(),  # noqa: B008  frozen
) -> Outcome:
    """Run every mode of a scenario and judge it.

    Args:
        loaded: the scenario.
        address: a running Ray cluster to join; None starts one on this machine.
        reproduce: the command that runs the same again.
        kept: work of earlier runs of the scenario on loopback, taken over and added to.
        asks: ask about determinism and measure the noise of twins, too.
        keep: what of the run outlives its verdict; all of it with ``kept``.

    Returns:
        A result whatever happens to the ranks; only bad input raises.

    Raises:
        UserError: see ``check_input``.
    """
    if reasons := reasons_not_to_run(loaded):
        facts = RunFacts(loaded=loaded, resolved=None, seconds={}, reproduce=reproduce)
        return Outcome(result=unsupported_result(facts, reasons))
    watch = Stopwatch()
    with watch.timing("resolve"):
        resolved = resolve(loaded)
    facts = RunFacts(loaded=loaded, resolved=resolved, seconds=watch.seconds, reproduce=reproduce)
    inputs, done, modes = rounds_of(loaded), JudgedModes(), loaded.scenario.inputs.modes
    keep = replace(keep, sides=keep.sides or loaded.scenario.compare is not None)
    try:
        with _living(loaded, resolved, address, watch, kept) as world:
            living = LivingScenario(loaded=loaded, resolved=resolved, inputs=inputs, world=world)
            if kept is None:
                judge_modes(living, done, watch.timing, asks=asks, keep=keep)
                runs, judges = done.in_order(living.modes), living.judges
            else:
                runs, judges = _judged_with(kept, living, done, watch, asks=asks)
    except WorldFailedError as error:
        return Outcome(result=failed_result(facts, error.summary, error.ranks))
    except UnreadableTraceError as error:
        mode = next(mode for mode in asks_last(map(Mode, modes)) if mode not in done.runs)
        return Outcome(result=unreadable_result(facts, error, mode, done.ranks))
    seen = tuple(world.seen) if isinstance(world, WatchedRanks) else ()
    result = judged_result(facts, runs, done.ranks)
    return Outcome(result=result, runs=runs, judges=judges, sides=done.sides, forwards=seen)


def _judged_with(
    kept: KeptWork, living: LivingScenario, done: JudgedModes, watch: Stopwatch, *, asks: bool
) -> tuple[tuple[ModeRun, ...], Mapping[str, Judge]]:
    """Judged forwards of all modes, with work of earlier runs, and the judges that they went by."""
    with watch.timing("ranks"):
        reports = living.forwards()
    done.ranks[:] = living.world.ranks()
    with watch.timing("golden and verdict"):
        runs, judges = kept.judged(living, reports, NUM_TWINS if asks else 0)
    with watch.timing("determinism"):
        runs = living.asked(runs, judges) if asks else runs
    with watch.timing("diagnosis"):
        runs = diagnosed(runs, judges)
    return runs, judges


def open_world(
    resolved: ResolvedScenario,
    run: RunSpec,
    address: str | None,
    kept: KeptWork | None = None,
) -> World:
    """Ranks for a resolved scenario, in this process or as Ray actors."""
    if run.runtime == "loopback":
        if kept is not None:
            return kept.open_ranks(resolved.plan, resolved.faults)
        return LoopbackRanks(resolved.plan, resolved.faults)
    from actors.cluster import RayRanks  # loopback must not pay for it

    return RayRanks(resolved.plan, resolved.faults, address=address, timeout_s=run.timeout_s)


@contextmanager
def _living(
    loaded: LoadedScenario,
    resolved: ResolvedScenario,
    address: str | None,
    watch: Stopwatch,
    kept: KeptWork | None,
) -> Iterator[World]:
    """Living ranks, which are gone when the block ends."""
    with watch.timing("start"):
        world = open_world(resolved, loaded.scenario.run, address, kept)
    with computing_on(resolved.plan.device), world:
        yield world
