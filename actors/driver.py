"""One scenario end to end: ranks, traces, verdict, result."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby

from actors.build import rank_weights
from actors.determinism import LivingLayer, ask_determinism, mode_to_ask
from actors.expected import check_expected
from actors.kept import KeptWork
from actors.rank_program import RankReport
from actors.resolve import ResolvedScenario, arm_faults, reasons_not_to_run, resolve
from actors.result_rows import CHECKS, ModeRun
from actors.results import RunFacts, failed_result, judged_result, unsupported_result
from actors.rounds import batch_of_round, compare_rounds, diagnose_rounds
from actors.world import LoopbackRanks, RankStatus, World, WorldFailedError
from moe.batch import Batch
from moe.faults import blinded_checks, edit_golden
from reports.result import Mode, Result
from reports.verdict.judge import Judge
from reports.verdict.readable import UnreadableTraceError
from reports.verdict.twins import NUM_TWINS
from scenarios.batches import batch_of
from scenarios.errors import Problem, ScenarioError
from scenarios.inputs import deal
from scenarios.loader import LoadedScenario
from scenarios.schema import RunSpec


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Outcome:
    """A result and the forwards behind it (empty unless every rank came back)."""

    result: Result
    runs: tuple[ModeRun, ...] = ()


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
            if mode == "file":
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
) -> Outcome:
    """Run every mode of a scenario and judge it.

    Args:
        loaded: the scenario.
        address: a running Ray cluster to join; None starts one on this machine.
        reproduce: the command that runs the same again.
        kept: work of earlier runs of the scenario on loopback, taken over and added to.
        asks: ask about determinism, too.

    Returns:
        A result whatever happens to the ranks; only bad input raises.

    Raises:
        UserError: see ``check_input``.
    """
    reasons, run = reasons_not_to_run(loaded), loaded.scenario.run
    if reasons:
        facts = RunFacts(loaded=loaded, resolved=None, seconds={}, reproduce=reproduce)
        return Outcome(result=unsupported_result(facts, reasons))
    watch = Stopwatch()
    with watch.timing("resolve"):
        resolved = resolve(loaded)
    facts = RunFacts(loaded=loaded, resolved=resolved, seconds=watch.seconds, reproduce=reproduce)
    inputs = _inputs(loaded)
    ranks: list[RankStatus] = []
    try:
        with _living(loaded, resolved, address, watch, kept) as world:
            with watch.timing("ranks"):
                reports = [_forward(world, resolved, one, run.timeout_s) for one in inputs]
            ranks += world.ranks()
            judges: Mapping[str, Judge] = _judges(resolved)
            if kept is not None:
                if same := kept.judged_before(reports, resolved.faults):
                    return same
                by_mode = {str(one.mode): made for one, made in zip(inputs, reports, strict=True)}
                judges = kept.judges(judges, by_mode, resolved.faults)
            with watch.timing("golden and verdict"):
                runs = _judge(judges, inputs, reports)
            with watch.timing("determinism"):
                runs = runs if not asks else _ask_determinism(loaded, resolved, judges, runs, world)
            with watch.timing("diagnosis"):
                runs = _diagnosed(judges, runs)
    except WorldFailedError as error:
        return Outcome(result=failed_result(facts, error.summary, error.ranks))
    except UnreadableTraceError as error:
        return Outcome(result=failed_result(facts, f"could not judge: {error}", ranks))
    return Outcome(result=judged_result(facts, runs, ranks), runs=runs)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Round:
    """What goes into one forward."""

    mode: Mode
    number: int
    batch: Batch


def _inputs(loaded: LoadedScenario) -> list[_Round]:
    """Every forward of every mode, in order."""
    scenario = loaded.scenario
    batches = {mode: batch_of(loaded, mode) for mode in scenario.inputs.modes}
    return [
        _Round(mode=Mode(mode), number=number, batch=batch_of_round(batch, number))
        for mode, batch in batches.items()
        for number in range(scenario.run.rounds)
    ]


def open_world(
    resolved: ResolvedScenario,
    run: RunSpec,
    address: str | None,
    kept: KeptWork | None = None,
) -> World:
    """Ranks for a resolved scenario, in this process or as Ray actors."""
    if run.runtime == "loopback":
        prepare = rank_weights if kept is None else kept.rank_weights
        return LoopbackRanks(resolved.plan, resolved.faults, prepare)
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
    with world:
        yield world


def _forward(
    world: World, resolved: ResolvedScenario, one: _Round, timeout_s: float
) -> list[RankReport]:
    """One forward on every rank, of its mode's layer."""
    plan = resolved.layers[one.mode].plan
    world.use(plan)
    return world.forward(deal(one.batch, plan.sync, plan.seed), timeout_s)


def _judges(resolved: ResolvedScenario) -> dict[str, Judge]:
    """A judge for each mode; modes with one layer share it, since it keeps decoded weights."""
    blinded = blinded_checks(resolved.faults)
    by_layer = {
        layer.plan.fingerprint(): Judge(edit_golden(layer.judged, resolved.faults), blinded)
        for layer in resolved.layers.values()
    }
    return {mode: by_layer[layer.plan.fingerprint()] for mode, layer in resolved.layers.items()}


def _judge(
    judges: Mapping[str, Judge], inputs: list[_Round], reports: list[list[RankReport]]
) -> tuple[ModeRun, ...]:
    runs = []
    for one, ranks in zip(inputs, reports, strict=True):
        traces = [report.trace for report in ranks]
        calls = [report.calls for report in ranks]
        twins = 0 if one.number or one.mode is Mode.EXACT else NUM_TWINS
        judgement = judges[one.mode].judge(one.batch, traces, calls, twins)
        runs.append(
            ModeRun(
                mode=one.mode,
                round=one.number,
                batch=one.batch,
                reports=ranks,
                judgement=judgement,
            )
        )
    for mode, rounds in groupby(runs, key=lambda run: run.mode):
        compare_rounds(judges[mode], list(rounds))
    return tuple(runs)


def _diagnosed(judges: Mapping[str, Judge], runs: Sequence[ModeRun]) -> tuple[ModeRun, ...]:
    """The runs with a diagnosis for whatever is wrong."""
    by_mode = groupby(runs, key=lambda run: run.mode)
    return tuple(
        run for mode, rounds in by_mode for run in diagnose_rounds(judges[mode], list(rounds))
    )


def _ask_determinism(
    loaded: LoadedScenario,
    resolved: ResolvedScenario,
    judges: Mapping[str, Judge],
    runs: tuple[ModeRun, ...],
    world: World,
) -> tuple[ModeRun, ...]:
    """The runs, those of the mode that is asked about determinism with its answers."""
    mode = mode_to_ask(runs)
    if mode is None:
        return runs
    living = LivingLayer(
        loaded=loaded, layer=resolved.layers[mode], judge=judges[mode], world=world
    )
    asked = iter(ask_determinism(living, [run for run in runs if run.mode is mode]))
    return tuple(next(asked) if run.mode is mode else run for run in runs)
