"""Mutation score: every fault let loose on a scenario, and what the verdict made of it."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from actors.driver import Outcome, run_scenario
from actors.kept import KeptWork, forwards_differ
from actors.output import default_folder, prepare_folder
from actors.resolve import arm_faults, resolve
from actors.results import environment
from actors.session import Work, scenarios_of
from actors.workers import workers
from moe.faults import (
    FAULTS,
    VOID_WHERE,
    ArmedFault,
    FaultKind,
    UnknownFaultError,
    edit_golden,
    fault_named,
)
from moe.formats import Stage
from reports.failure import GUILTY
from reports.result import Confidence, Result, Verdict
from reports.score import Fate, Pair, ScenarioScore, Score, fingerprint, write_score
from scenarios.errors import InputError
from scenarios.inject import FaultSpec
from scenarios.loader import LoadedScenario
from scenarios.sources import sources_of


def check_scorable(loaded: LoadedScenario) -> None:
    """Refuse what no score can be taken of.

    Raises:
        InputError: it injects faults itself.
    """
    if loaded.faults:
        raise InputError(f"{loaded.path}: injects {loaded.faults[0].name}; a score brings its own")


def check_known(faults: Sequence[str]) -> None:
    """Refuse names of no fault.

    Raises:
        InputError: all of them, with what there is nearby.
    """
    problems = []
    for name in faults:
        try:
            fault_named(name)
        except UnknownFaultError as error:
            problems.append(str(error))
    if problems:
        raise InputError("\n".join(problems))


def take_score(
    work: Sequence[Work],
    out: Path | None,
    jobs: int,
    tell: Callable[[str], object],
    faults: Sequence[str] = (),
) -> tuple[Score, Path]:
    """The score of all that a command names, and the file that has it; written as it grows.

    Args:
        work: scenarios and sweeps.
        out: folder of ``score.json``; None is ``runs/<time>-score``.
        jobs: processes.
        tell: is given a line a scenario, as soon as it is scored.
        faults: names of the faults to inject; none: every one.

    Raises:
        UserError: a scenario that injects faults itself, a fault that does not exist, or a folder
            that cannot be written to.
    """
    check_known(faults)
    scenarios = [loaded for one in work for loaded in scenarios_of(one)]
    for loaded in scenarios:
        check_scorable(loaded)
    folder = default_folder("score") if out is None else out
    prepare_folder(folder)
    file, start = folder / "score.json", time.perf_counter()
    score = Score(scenarios=[], environment=environment(), seconds=0.0)
    chosen = tuple(faults) or tuple(FAULTS)
    for row in score_scenarios(scenarios, min(jobs, len(scenarios)), chosen):
        tell(f"{row.name}: {len(row.pairs)} faults, {row.seconds:.0f} s; {row.clean}")
        seconds = round(time.perf_counter() - start, 1)
        score = score.model_copy(update={"scenarios": (*score.scenarios, row), "seconds": seconds})
        write_score(score, file)
    return score, file


def score_scenarios(
    scenarios: Sequence[LoadedScenario], jobs: int, faults: Sequence[str] = tuple(FAULTS)
) -> Iterator[ScenarioScore]:
    """The score of each, in order, as soon as it is known.

    Args:
        scenarios: scorable ones.
        jobs: processes; with 1, this one.
        faults: names of the faults to inject, with their default parameters.
    """
    score = partial(score_scenario, faults=tuple(faults))
    if jobs == 1:
        yield from map(score, scenarios)
        return
    with workers(jobs) as pool:
        yield from pool.map(score, scenarios)


def score_scenario(loaded: LoadedScenario, faults: Iterable[str]) -> ScenarioScore:
    """Let each fault loose on a scenario, on loopback.

    Args:
        loaded: without faults of its own.
        faults: names of faults.
    """
    start = time.perf_counter()
    run = loaded.scenario.run.model_copy(update={"runtime": "loopback"})
    loaded = replace(loaded, scenario=loaded.scenario.model_copy(update={"run": run}))
    kept = KeptWork()
    clean = run_scenario(loaded, kept=kept)
    pairs = {}
    if clean.result.verdict is Verdict.AGREE:
        pairs = {name: score_fault(loaded, clean, kept, FaultSpec(name, {})) for name in faults}
    return ScenarioScore(
        name=loaded.scenario.name,
        fingerprint=fingerprint(clean.result.scenario, sources_of(loaded)),
        clean=clean.result.summary,
        seconds=round(time.perf_counter() - start, 2),
        pairs=pairs,
    )


def score_fault(loaded: LoadedScenario, clean: Outcome, kept: KeptWork, fault: FaultSpec) -> Pair:
    """What becomes of one fault in a scenario.

    Args:
        loaded: the scenario, on loopback.
        clean: its run without faults.
        kept: by that run.
        fault: with its parameters.
    """
    faulty = replace(loaded, faults=(fault,))
    outcome = run_scenario(faulty, kept=kept)
    result = outcome.result
    if result.verdict is Verdict.UNSUPPORTED:
        return Pair(fate=Fate.UNSUPPORTED, reason=result.summary)
    (armed,) = arm_faults(faulty)
    if result.verdict is Verdict.AGREE:
        is_other = forwards_differ(clean.forwards, outcome.forwards)
        if is_other or _changes_the_judge(loaded, armed):
            return Pair(fate=Fate.SURVIVED)
        return Pair(fate=Fate.VOID, reason=_why_void(armed, outcome))
    return _killed(result, armed, places_of(faulty, armed))


def _why_void(armed: ArmedFault, outcome: Outcome) -> str:
    """What kept a fault from changing anything that is traced."""
    acted = any(armed.name in report.acted for ranks in outcome.forwards for report in ranks)
    found = "acted, yet changed no bit that is traced" if acted else "found nothing to act on"
    return f"{found}; it is void where: {VOID_WHERE[armed.name]}"


def _changes_the_judge(loaded: LoadedScenario, armed: ArmedFault) -> bool:
    """Whether a fault of what judges is one here; one of the golden may have nothing to change."""
    judged = resolve(loaded).judged
    if armed.fault.kind is FaultKind.GOLDEN:
        return edit_golden(judged, [armed]) is not judged
    return armed.fault.kind is FaultKind.CHECKER


def places_of(loaded: LoadedScenario, armed: ArmedFault) -> frozenset[Stage]:
    """Where a fault acts: the stages of the collective it names, or its own; empty if nowhere."""
    try:
        return frozenset({armed.stage_in(resolve(loaded).plan)})
    except ValueError:
        return frozenset()


def _killed(result: Result, armed: ArmedFault, stages: frozenset[Stage]) -> Pair:
    """Of a fault with a verdict other than agree: how well it was told."""
    found = _places(result)
    if not found:
        return Pair(fate=Fate.KILLED)
    right = [(stage, rank) for stage, rank in found if stage in stages and rank in armed.ranks]
    stage, rank = (right or found)[0]
    mistakes = [
        finding.mistake
        for finding in result.findings
        if (finding.stage, finding.rank) == (stage, rank)
        and finding.mistake is not None
        and finding.confidence is not Confidence.NONE
    ]
    named = [mistake for mistake in mistakes if mistake in armed.fault.mistakes]
    localised = Fate.NAMED if named else Fate.LOCALISED
    return Pair(
        fate=localised if right else Fate.KILLED,
        stage=stage,
        rank=rank,
        mistake=next(iter([*named, *mistakes]), None),
    )


def _places(result: Result) -> list[tuple[Stage, int]]:
    """Where the first divergence is; of a run without one, where its guilty ranks ended."""
    if result.first_divergence is not None:
        return [(result.first_divergence.stage, result.first_divergence.rank)]
    return [
        (info.stage, info.rank)
        for info in result.ranks
        if info.verdict in GUILTY and info.stage is not None
    ]
