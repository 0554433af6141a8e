"""From judgements, failures and refusals to ``result.json``'s types."""

import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import version
from itertools import groupby
from typing import Any, Final

import torch

from actors.certificates import certificate_of
from actors.expected import is_expected
from actors.idle_faults import idle_faults
from actors.machine import gpu_facts
from actors.notes import idle_switches, notes_of
from actors.resolve import ResolvedScenario
from actors.result_rows import (
    CHECKS,
    ModeRun,
    beyond_a_gap,
    checks_of,
    distances_of,
    noise_of,
    stage_rows_of,
    traffic_of,
    visibility_of,
    weight_rows_of,
)
from actors.sentences import summary_of
from actors.world import RankStatus
from moe.formats import Stage
from reports.result import (
    Backend,
    Check,
    CheckVerdict,
    Confidence,
    Divergence,
    Finding,
    Mode,
    RankInfo,
    RankVerdict,
    Result,
    Verdict,
    WeightRow,
)
from reports.verdict.deviation import Deviation
from reports.verdict.readable import UnreadableTraceError
from reports.verdict.stage_checks import CONTRACT
from scenarios.loader import LoadedScenario


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunFacts:
    """What a result says whatever came out.

    resolved   None where the scenario was not run
    seconds    by what they were spent on
    reproduce  the command that runs the same again
    notes      what a reader has to know of this run
    """

    loaded: LoadedScenario
    resolved: ResolvedScenario | None
    seconds: dict[str, float]
    reproduce: str
    notes: Sequence[str] = ()

    def result(self, verdict: Verdict, summary: str, *, as_expected: bool, **found: Any) -> Result:  # noqa: ANN401
        """A result with these facts, a verdict and whatever else was found."""
        loaded, resolved = self.loaded, self.resolved
        backends = {} if resolved is None else resolved.backends
        idle = [] if resolved is None else idle_switches(loaded, resolved.plan)
        return Result(
            name=loaded.scenario.name,
            about=loaded.scenario.about,
            scenario=loaded.scenario.model_dump(mode="json"),
            model={**asdict(loaded.model), "scoring_func": str(loaded.model.scoring_func)},
            verdict=verdict,
            as_expected=as_expected,
            summary=" ".join(summary.split()),
            backends={axis: Backend(**asdict(choice)) for axis, choice in backends.items()},
            notes=[*self.notes, *loaded.notes, *notes_of(loaded), *idle],
            timing=self.seconds,
            environment=environment(),
            reproduce=self.reproduce,
            **found,
        )


def judged_result(facts: RunFacts, runs: Sequence[ModeRun], ranks: Sequence[RankStatus]) -> Result:
    """The result of a run whose ranks all came back."""
    found = [(run, deviation) for run in runs for deviation in run.judgement.ledger.deviations]
    found.sort(key=_order_of_blame)
    findings = [_finding(run, deviation) for run, deviation in found]
    divergence = Divergence(**_fields(*found[0])) if found else None
    blinded = sorted({name for run in runs for name in run.judgement.ledger.blinded})
    verdict = Verdict.FAILED if blinded else Verdict.AGREE
    summary = f"failed: could not judge {', '.join(blinded)}: blinded by an injected fault"
    gap = None if found or blinded else beyond_a_gap(runs)
    if found:
        verdict = Verdict.DISCREPANCY
    if found or not blinded:
        summary = summary_of(facts.loaded, runs, findings)
    if gap:
        verdict, summary = Verdict.FAILED, f"failed: could not judge {gap}"
    for name in [] if facts.resolved is None else idle_faults(facts.resolved, runs):
        summary += f"; fault {name} found nothing to act on"
    return facts.result(
        verdict,
        summary,
        as_expected=is_expected(facts.loaded, verdict, findings[0] if findings else None),
        checks=[check for rounds in _by_mode(runs) for check in checks_of(rounds)],
        first_divergence=divergence,
        findings=findings,
        stages=[row for rounds in _by_mode(runs) for row in stage_rows_of(rounds)],
        visibility=[row for rounds in _by_mode(runs) for row in visibility_of(rounds[0])],
        certificate=certificate_of([run.judgement for run in runs]),
        ranks=[rank_info(status) for status in ranks],
        traffic=traffic_of(runs[0]) if runs else [],
        golden=[row for rounds in _by_mode(runs) for row in distances_of(rounds[0])],
        noise=[row for rounds in _by_mode(runs) for row in noise_of(rounds[0])],
        weights=_weights_of(facts, runs),
    )


def _weights_of(facts: RunFacts, runs: Sequence[ModeRun]) -> list[WeightRow]:
    """What became of the weights: those of exact mode, which hardly round, if no others are."""
    if facts.resolved is None or not runs:
        return []
    plan = facts.resolved.plan
    run = next((run for run in runs if run.mode is not Mode.EXACT), runs[0])
    return list(weight_rows_of(run, plan.recipe, plan.scale_format))


def _by_mode(runs: Sequence[ModeRun]) -> list[list[ModeRun]]:
    """The rounds of each mode, in order."""
    return [list(rounds) for _, rounds in groupby(runs, key=lambda run: run.mode)]


def failed_result(facts: RunFacts, summary: str, ranks: Sequence[RankStatus]) -> Result:
    """The result of a run that could not be judged, first of all for ranks that did not return."""
    expect = facts.loaded.scenario.expect
    return facts.result(
        Verdict.FAILED,
        f"failed: {summary}",
        as_expected=expect.verdict == "failed",
        checks=[
            Check(
                name=name,
                mode=Mode(mode),
                verdict=CheckVerdict.FAILED,
                detail=summary,
            )
            for mode in facts.loaded.scenario.inputs.modes
            for name in CHECKS
        ],
        ranks=[rank_info(status) for status in ranks],
    )


def unreadable_result(
    facts: RunFacts, error: UnreadableTraceError, mode: Mode, ranks: Sequence[RankStatus]
) -> Result:
    """Ranks that came back with a tensor of a form that no check can read.

    Args:
        facts: of the run.
        error: the first such tensor, where one rank's form differs from the others' or from what
            its stage hands on. Nothing of the mode is judged beside it.
        mode: whose forward it was.
        ranks: where each lives.
    """
    if not error.tensor:
        return failed_result(facts, f"could not judge: {error}", ranks)
    finding = Finding(
        mode=mode,
        stage=error.stage,
        rank=error.rank,
        tensor=error.tensor,
        check=CONTRACT,
        detail=error.detail,
        diagnosis=_NOT_READ_ON,
        confidence=Confidence.NONE,
    )
    verdict = Verdict.DISCREPANCY
    return facts.result(
        verdict,
        f"{verdict}: stage {error.stage}, rank {error.rank}: {error.detail}; {_NOT_READ_ON}",
        as_expected=is_expected(facts.loaded, verdict, finding),
        checks=[_check_of_unreadable(name, mode, error) for name in CHECKS],
        first_divergence=Divergence(**finding.model_dump(include={*Divergence.model_fields})),
        findings=[finding],
        ranks=[rank_info(status) for status in ranks],
    )


_NOT_READ_ON: Final = "no check can read it"


def _check_of_unreadable(name: str, mode: Mode, error: UnreadableTraceError) -> Check:
    is_contract = name == CONTRACT
    return Check(
        name=name,
        mode=mode,
        verdict=CheckVerdict.DISCREPANCY if is_contract else CheckVerdict.FAILED,
        detail=str(error),
    )


def unsupported_result(facts: RunFacts, reasons: Sequence[str]) -> Result:
    """The result of a scenario that this version or machine cannot run."""
    expect = facts.loaded.scenario.expect
    return facts.result(
        Verdict.UNSUPPORTED,
        f"unsupported: {'; '.join(reasons)}",
        as_expected=expect.verdict == "unsupported",
    )


_version_of = cache(version)
"""The files of a package's metadata are searched once, not for every result."""


def environment() -> dict[str, str | int]:
    """Versions and machine, as far as they can change a number or a duration."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "ray": _version_of("ray"),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpus": os.cpu_count() or 0,
        **gpu_facts(),
    }


def rank_info(status: RankStatus) -> RankInfo:
    """A rank's status as the result has it."""
    return RankInfo(
        rank=status.rank,
        node=status.node,
        pid=status.pid,
        device=status.device,
        verdict=RankVerdict(status.state),
        stage=Stage(status.stage) if status.stage in list(Stage) else None,
        cause=status.cause,
    )


def _order_of_blame(found: tuple[ModeRun, Deviation]) -> tuple[object, ...]:
    """Earliest stage first, own errors before lost bits, exact mode before the others, ..."""
    run, deviation = found
    stage, loses_bits, *others = deviation.blame
    return stage, loses_bits, run.mode is not Mode.EXACT, *others


def _finding(run: ModeRun, deviation: Deviation) -> Finding:
    diagnosis = run.diagnoses[deviation]
    return Finding(
        **_fields(run, deviation),
        diagnosis=diagnosis.words,
        mistake=diagnosis.mistake,
        confidence=Confidence(diagnosis.certainty),
    )


def _fields(run: ModeRun, deviation: Deviation) -> dict[str, Any]:
    fields = asdict(deviation)
    del fields["ratio"], fields["rows"], fields["breach"]
    return {"mode": run.mode, "round": run.round + 1, **fields}
