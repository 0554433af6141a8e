"""The tables of a result: checks, stages, visibility, traffic and distances of one mode."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from actors.rank_program import RankReport
from moe.batch import Batch
from moe.formats import QuantRecipe, ScaleFormat, Stage
from moe.recipes import RECIPES
from reports.result import (
    Check,
    CheckVerdict,
    GoldenDistance,
    Mode,
    StageRow,
    Traffic,
    Visibility,
    WeightRow,
)
from reports.verdict.determinism import BATCH, RERUN, TOPOLOGY
from reports.verdict.judge import Judgement
from reports.verdict.ledger import MOVES, Deviation
from reports.verdict.rules import QUANTISER, ROUTER
from reports.verdict.stage_checks import ACCOUNTS, BAND, CONTRACT
from reports.verdict.stage_weights import PREPARATION

CHECKS = {
    ACCOUNTS: "routes sent = received = computed = combined; calls and bytes as the routes say",
    CONTRACT: "ids, counts, segments, dtypes and layouts at every boundary",
    PREPARATION: "prepared weights equal the golden's preparation, value by value",
    MOVES: "moved data has every bit it had",
    BAND: "every cell within the band of its declared rounding points",
    QUANTISER: "codes and scales as the golden rounds them, or next to a rounding boundary",
    ROUTER: "chosen experts are the golden's, or tie with them within the router's band",
    RERUN: "a token list that comes again gives every stage the same bits, whatever fills padding "
    "and memory that was given back",
    BATCH: "a token has the same bits alone, among others, on another rank",
    TOPOLOGY: "the same tokens have the same bits on other ranks, or a rounding point is declared",
}
NOT_IN_THIS_VERSION = {"exact": "exact inputs are not made by this version"}
_DETERMINISM = "asked of one mode whose sums round, where a token is there and nothing is wrong"
WHY_NOT_ASKED = {RERUN: _DETERMINISM, BATCH: _DETERMINISM, TOPOLOGY: _DETERMINISM}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a check came to that found nothing, in words of its own."""

    verdict: CheckVerdict
    detail: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModeRun:
    """One forward of all ranks and what the verdict says of it.

    round    which forward on the same buffers, from 0
    answers  what checks have to say for themselves, by name
    also_acted  faults that changed something in forwards that are not judged
    """

    mode: Mode
    round: int = 0
    batch: Batch
    reports: Sequence[RankReport]
    judgement: Judgement
    answers: Mapping[str, Answer] = field(default_factory=dict)
    also_acted: frozenset[str] = frozenset()


def checks_of(runs: Sequence[ModeRun]) -> Iterator[Check]:
    """Every check of one mode's rounds: what it found, or why it was not asked."""
    ledgers, mode = [run.judgement.ledger for run in runs], runs[0].mode
    found: dict[str, list[Deviation]] = {}
    for ledger in ledgers:
        for deviation in ledger.deviations:
            found.setdefault(deviation.check, []).append(deviation)
    answers = {name: answer for run in runs for name, answer in run.answers.items()}
    for name, asked in CHECKS.items():
        verdict, detail = CheckVerdict.AGREE, asked
        if name in found:
            verdict, detail = CheckVerdict.DISCREPANCY, _places(found[name])
        elif any(name in ledger.blinded for ledger in ledgers):
            verdict, detail = CheckVerdict.FAILED, "blinded by an injected fault"
        elif name in answers:
            verdict, detail = answers[name].verdict, answers[name].detail
        elif not any(name in ledger.asked for ledger in ledgers):
            verdict = CheckVerdict.NOT_APPLICABLE
            detail = WHY_NOT_ASKED.get(name, "nothing of its kind in this run")
        yield Check(name=name, mode=mode, verdict=verdict, detail=detail)
    for name, reason in NOT_IN_THIS_VERSION.items():
        not_asked = CheckVerdict.NOT_APPLICABLE
        yield Check(name=name, mode=mode, verdict=not_asked, detail=reason)


def _places(found: Sequence[Deviation]) -> str:
    """Where a check found something, the earliest first, and the first thing it found."""
    places = list(dict.fromkeys(f"{one.stage} on rank {one.rank}" for one in found))
    more = f" and {len(places) - 4} more" if len(places) > 4 else ""
    return f"{', '.join(places[:4])}{more}: {found[0].detail}"


def stage_rows_of(runs: Sequence[ModeRun]) -> Iterator[StageRow]:
    """Own and inherited worst of every stage on every rank, over one mode's rounds."""
    for stage in Stage:
        for rank in range(len(runs[0].reports)):
            worst = _worst(run.judgement.ledger.worst.get((stage, rank)) for run in runs)
            inherited = (run.judgement.end_to_end.worst_row.get((stage, rank)) for run in runs)
            verdict = CheckVerdict.NOT_APPLICABLE
            if worst is not None:
                verdict = CheckVerdict.DISCREPANCY if worst > 1 else CheckVerdict.AGREE
            yield StageRow(
                mode=runs[0].mode,
                stage=stage,
                rank=rank,
                own_worst=worst,
                end_to_end_worst=_worst(inherited),
                verdict=verdict,
            )


def _worst(values: Iterable[float | None]) -> float | None:
    """The largest of those that are there."""
    return max((value for value in values if value is not None), default=None)


def visibility_of(run: ModeRun) -> Iterator[Visibility]:
    """What each stage's checks would have shown."""
    ledger = run.judgement.ledger
    compared = {stage for stage, _ in ledger.worst}
    for stage in Stage:
        effect = ledger.effects.get(stage)
        note = "moved or coded: any changed bit" if stage in compared else "nothing was compared"
        if stage in ledger.banded:
            note = "no cell that a band bounds" if effect is None else "median of band / |value|"
        if stage in ledger.unbounded:
            note += f"; {ledger.unbounded[stage]} cells may overflow and have no band"
        yield Visibility(mode=run.mode, stage=stage, smallest_relative_effect=effect, note=note)


def traffic_of(reports: Sequence[RankReport]) -> list[Traffic]:
    """What every collective of one forward moved, group by group."""
    calls = [report.calls for report in reports]
    rows = []
    for made in zip(*calls, strict=False):  # ranks that parted ways are the accounts' finding
        for group in dict.fromkeys(call.group for call in made):
            call = made[group[0]]
            rows.append(
                Traffic(
                    stage=Stage(call.stage),
                    op=call.op,
                    group=group,
                    payload_bytes=[made[rank].payload_bytes for rank in group],
                )
            )
    return rows


def weight_rows_of(run: ModeRun, recipe: QuantRecipe, scales: ScaleFormat) -> Iterator[WeightRow]:
    """What preparation and the recipe did to each weight tensor."""
    for change in run.judgement.weight_changes:
        of_shared = change.tensor.startswith("shared.")
        of_tensor = RECIPES[RECIPES[recipe].shared if of_shared else recipe]
        row = asdict(change)
        path = of_tensor.load_path(scales, has_scales=row.pop("has_scales"))
        yield WeightRow(path=path, **row)


def distances_of(run: ModeRun) -> Iterator[GoldenDistance]:
    """The recipe's own error, and the run's against its recipe, stage by stage."""
    for stage, distance in run.judgement.end_to_end.distances.items():
        yield GoldenDistance(mode=run.mode, stage=stage, **asdict(distance))
