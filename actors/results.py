"""From judgements, failures and refusals to ``result.json``'s types."""

import os
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor

from actors.rank_program import RankReport
from actors.resolve import ResolvedScenario
from actors.world import RankStatus
from moe.faults import FaultKind
from moe.formats import QuantRecipe, Stage
from reports.result import (
    Backend,
    Check,
    CheckVerdict,
    Confidence,
    Divergence,
    Finding,
    GoldenDistance,
    Mode,
    RankInfo,
    RankVerdict,
    Result,
    StageRow,
    Traffic,
    Verdict,
    Visibility,
)
from reports.verdict.accounts import ACCOUNTS
from reports.verdict.contracts import CONTRACT
from reports.verdict.judge import Judgement
from reports.verdict.ledger import MOVES, Deviation
from reports.verdict.rules import QUANTISER, ROUTER
from reports.verdict.stage_checks import BAND
from reports.verdict.stage_weights import PREPARATION
from scenarios.loader import LoadedScenario

CHECKS = {
    ACCOUNTS: "routes sent = received = computed = combined; calls and bytes as the routes say",
    CONTRACT: "ids, counts, segments, dtypes and layouts at every boundary",
    PREPARATION: "prepared weights equal the golden's preparation, value by value",
    MOVES: "moved data has every bit it had",
    BAND: "every cell within the band of its declared rounding points",
    QUANTISER: "codes and scales as the golden rounds them, or next to a rounding boundary",
    ROUTER: "chosen experts are the golden's, or tie with them within the router's band",
}
NOT_IN_THIS_VERSION = {
    "exact": "exact inputs are not made by this version",
    "determinism": "reruns are not compared by this version",
}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModeRun:
    """One forward of all ranks and what the verdict says of it."""

    mode: Mode
    hidden_states: Tensor
    reports: Sequence[RankReport]
    judgement: Judgement


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunFacts:
    """What a result says whatever came out.

    resolved   None where the scenario was not run
    seconds    by what they were spent on
    reproduce  the command that runs the same again
    """

    loaded: LoadedScenario
    resolved: ResolvedScenario | None
    seconds: dict[str, float]
    reproduce: str

    def result(self, verdict: Verdict, summary: str, *, as_expected: bool, **found: Any) -> Result:  # noqa: ANN401
        """A result with these facts, a verdict and whatever else was found."""
        loaded, resolved = self.loaded, self.resolved
        backends = {} if resolved is None else resolved.backends
        return Result(
            name=loaded.scenario.name,
            about=loaded.scenario.about,
            scenario=loaded.scenario.model_dump(mode="json"),
            model={**asdict(loaded.model), "scoring_func": str(loaded.model.scoring_func)},
            verdict=verdict,
            as_expected=as_expected,
            summary=" ".join(summary.split()),
            backends={axis: Backend(**asdict(choice)) for axis, choice in backends.items()},
            notes=[*loaded.notes, *_semantic_notes(loaded)],
            timing=self.seconds,
            environment=environment(),
            reproduce=self.reproduce,
            **found,
        )


RANKS_OF_A_NODE = 8


def _semantic_notes(loaded: LoadedScenario) -> list[str]:
    """Where the rules modelled are the reference's and not SGLang 0.5.21's as written."""
    notes = []
    limit = loaded.model.swiglu_limit
    if loaded.scenario.moe.recipe is QuantRecipe.BF16 and limit is not None:
        notes.append(
            f"experts clamp at {limit:g}, as the model says; the bf16 experts of SGLang 0.5.21 do "
            "not (by reading of its source)"
        )
    if loaded.scenario.parallel.moe.ep > RANKS_OF_A_NODE:
        notes.append(
            "combine adds all ranks as on one node; between nodes DeepEP adds in steps, with more "
            "roundings"
        )
    return notes


def judged_result(facts: RunFacts, runs: Sequence[ModeRun], ranks: Sequence[RankStatus]) -> Result:
    """The result of a run whose ranks all came back."""
    found = [(run.mode, deviation) for run in runs for deviation in run.judgement.ledger.deviations]
    found.sort(key=_order_of_blame)
    divergence = Divergence(**_fields(*found[0])) if found else None
    blinded = sorted({name for run in runs for name in run.judgement.ledger.blinded})
    verdict = Verdict.FAILED if blinded else Verdict.AGREE
    summary = f"failed: could not judge {', '.join(blinded)}: blinded by an injected fault"
    if found:
        verdict = Verdict.DISCREPANCY
    if found or not blinded:
        summary = _summary(facts.loaded, runs, divergence)
    for name in _idle_faults(facts, runs):
        summary += f"; fault {name} found nothing to act on"
    return facts.result(
        verdict,
        summary,
        as_expected=_as_expected(facts.loaded, verdict, divergence),
        checks=[check for run in runs for check in _checks(run)],
        first_divergence=divergence,
        findings=[
            Finding(
                **_fields(mode, deviation),
                diagnosis=f"unexplained: {deviation.detail}",
                confidence=Confidence.NONE,
            )
            for mode, deviation in found
        ],
        stages=[row for run in runs for row in _stage_rows(run)],
        visibility=[row for run in runs for row in _visibility(run)],
        ranks=[rank_info(status) for status in ranks],
        traffic=_traffic(runs[0].reports) if runs else [],
        golden=[row for run in runs for row in _distances(run)],
    )


def _idle_faults(facts: RunFacts, runs: Sequence[ModeRun]) -> list[str]:
    """Injected faults that changed nothing on any rank, as where their rank has no row."""
    acted = {name for run in runs for report in run.reports for name in report.acted}
    armed = () if facts.resolved is None else facts.resolved.faults
    return [
        fault.name
        for fault in armed
        if fault.fault.kind is not FaultKind.CHECKER and fault.name not in acted
    ]


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


def unsupported_result(facts: RunFacts, reasons: Sequence[str]) -> Result:
    """The result of a scenario that this version or machine cannot run."""
    expect = facts.loaded.scenario.expect
    return facts.result(
        Verdict.UNSUPPORTED,
        f"unsupported: {'; '.join(reasons)}",
        as_expected=expect.verdict == "unsupported",
    )


def environment() -> dict[str, str | int]:
    """Versions and machine, as far as they can change a number or a duration."""
    return {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "ray": version("ray"),
        "system": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpus": os.cpu_count() or 0,
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


def _order_of_blame(found: tuple[Mode, Deviation]) -> tuple[int, bool, bool, float, int]:
    """Earliest stage first, exact mode before the others, then the ledger's own order."""
    mode, deviation = found
    stage, unplaced, error, rank = deviation.blame
    return stage, mode is not Mode.EXACT, unplaced, error, rank


def _as_expected(loaded: LoadedScenario, verdict: Verdict, divergence: Divergence | None) -> bool:
    expect = loaded.scenario.expect
    if verdict != expect.verdict:
        return False
    if divergence is None:
        return True
    return expect.stage == divergence.stage and expect.mode in (None, divergence.mode)


def _summary(loaded: LoadedScenario, runs: Sequence[ModeRun], divergence: Divergence | None) -> str:
    tokens, ranks = sum(loaded.scenario.batch.tokens), loaded.scenario.parallel.world_size
    if divergence is not None:
        return f"discrepancy: {_where(divergence)}: {_what(divergence)}"
    if tokens == 0:
        return f"agree: no token on any of {ranks} ranks; accounts and contracts hold"
    (stage, rank), worst = max(
        ((key, worst) for run in runs for key, worst in run.judgement.ledger.worst.items()),
        key=lambda item: item[1],
    )
    return (
        f"agree: {ranks} ranks, {tokens} tokens; every stage within its band; "
        f"closest: stage {stage} on rank {rank}, at {worst:.3f} of its band"
    )


def _where(divergence: Divergence) -> str:
    places = [f"stage {divergence.stage}", f"rank {divergence.rank}"]
    for name in ("token", "slot", "expert"):
        value = getattr(divergence, name)
        if value is not None:
            places.append(f"{name} {value}")
    return ", ".join(places)


def _what(divergence: Divergence) -> str:
    if divergence.got is None or divergence.want is None:
        return f"{divergence.tensor}: {divergence.detail}"
    band = f" (band {divergence.band:.3g})" if divergence.band else ""
    return f"{divergence.tensor} is {divergence.got:.6g}, not {divergence.want:.6g}{band}"


def _fields(mode: Mode, deviation: Deviation) -> dict[str, Any]:
    fields = asdict(deviation)
    del fields["ratio"], fields["rows"]
    return {"mode": mode, **fields}


def _checks(run: ModeRun) -> Iterator[Check]:
    """Every check of one mode: what it found, or why it was not asked."""
    found: dict[str, list[Deviation]] = {}
    for deviation in run.judgement.ledger.deviations:
        found.setdefault(deviation.check, []).append(deviation)
    for name, asked in CHECKS.items():
        verdict, detail = CheckVerdict.AGREE, asked
        if name in found:
            verdict, detail = CheckVerdict.DISCREPANCY, _places(found[name])
        elif name in run.judgement.ledger.blinded:
            verdict, detail = CheckVerdict.FAILED, "blinded by an injected fault"
        elif name not in run.judgement.ledger.asked:
            verdict, detail = CheckVerdict.NOT_APPLICABLE, "nothing of its kind in this run"
        yield Check(name=name, mode=run.mode, verdict=verdict, detail=detail)
    for name, reason in NOT_IN_THIS_VERSION.items():
        not_asked = CheckVerdict.NOT_APPLICABLE
        yield Check(name=name, mode=run.mode, verdict=not_asked, detail=reason)


def _places(found: Sequence[Deviation]) -> str:
    """Where a check found something, the earliest first, and the first thing it found."""
    places = list(dict.fromkeys(f"{one.stage} on rank {one.rank}" for one in found))
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return f"{', '.join(places[:4])}{more}: {found[0].detail}"


def _stage_rows(run: ModeRun) -> Iterator[StageRow]:
    ledger, inherited = run.judgement.ledger, run.judgement.end_to_end.worst_row
    for stage in Stage:
        for rank in range(len(run.reports)):
            worst = ledger.worst.get((stage, rank))
            verdict = CheckVerdict.NOT_APPLICABLE
            if worst is not None:
                verdict = CheckVerdict.DISCREPANCY if worst > 1 else CheckVerdict.AGREE
            yield StageRow(
                mode=run.mode,
                stage=stage,
                rank=rank,
                own_worst=worst,
                end_to_end_worst=inherited.get((stage, rank)),
                verdict=verdict,
            )


def _visibility(run: ModeRun) -> Iterator[Visibility]:
    ledger = run.judgement.ledger
    compared = {stage for stage, _ in ledger.worst}
    for stage in Stage:
        effect = ledger.effects.get(stage)
        note = "moved or coded: any changed bit" if stage in compared else "nothing was compared"
        if stage in ledger.banded:
            note = "no cell that a band bounds" if effect is None else "median of band / |value|"
        yield Visibility(mode=run.mode, stage=stage, smallest_relative_effect=effect, note=note)


def _traffic(reports: Sequence[RankReport]) -> list[Traffic]:
    """What every collective of one forward moved; all members make the same calls."""
    calls = [report.calls for report in reports]
    rows = []
    for index in range(min(map(len, calls), default=0)):
        call = calls[0][index]
        rows.append(
            Traffic(
                stage=Stage(call.stage),
                op=call.op,
                group=call.group,
                payload_bytes=[calls[rank][index].payload_bytes for rank in call.group],
            )
        )
    return rows


def _distances(run: ModeRun) -> Iterator[GoldenDistance]:
    for stage, distance in run.judgement.end_to_end.distances.items():
        yield GoldenDistance(mode=run.mode, stage=stage, **asdict(distance))
