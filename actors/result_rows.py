"""The tables of a result: checks, stages, visibility, traffic and distances of one mode."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from actors.certificates import exact_note, refusals_of, unfit_to_judge
from actors.rank_program import RankReport
from moe.batch import Batch
from moe.formats import QuantRecipe, ScaleFormat, Stage
from moe.recipes import RECIPES
from reports.result import (
    Check,
    CheckVerdict,
    GoldenDistance,
    Mode,
    NoiseFloor,
    StageRow,
    Traffic,
    Visibility,
    WeightRow,
)
from reports.verdict.compared import BAND
from reports.verdict.determinism import BATCH, RERUN, TOPOLOGY
from reports.verdict.deviation import Deviation
from reports.verdict.diagnosis import Diagnosis
from reports.verdict.distribution import DISTRIBUTION, FALSE_ALARMS
from reports.verdict.exact_compared import EXACT
from reports.verdict.judgement import Judgement
from reports.verdict.ledger import MOVES
from reports.verdict.rules import QUANTISER, ROUTER
from reports.verdict.sight import NOTHING_SEEN, sight_of
from reports.verdict.stage_checks import ACCOUNTS, CONTRACT
from reports.verdict.stage_weights import PREPARATION
from reports.verdict.stores import STORES
from reports.verdict.tallies import Kind
from topology.collectives import CollectiveCall

CHECKS = {
    ACCOUNTS: "routes sent = received = computed = combined; calls and bytes as the routes say",
    CONTRACT: "ids, counts, segments, dtypes and layouts at every boundary",
    PREPARATION: "prepared weights equal the golden's preparation, value by value",
    MOVES: "moved data has every bit it had",
    BAND: "every cell within the band of its declared rounding points",
    STORES: "what is stored as bf16 is what the golden's value rounds to, or next to a boundary",
    DISTRIBUTION: "of each rank, expert and column block, such steps of a GEMM lean to no side; if "
    f"signs are drawn, a clean forward is reported with a probability under {FALSE_ALARMS:g}",
    QUANTISER: "codes and scales as the golden rounds them, or next to a rounding boundary",
    ROUTER: "chosen experts are the golden's, or tie with them within the router's band",
    EXACT: "every certified cell of every stage has the one value that it can have",
    RERUN: "a token list that comes again gives every stage the same bits, whatever fills padding "
    "and memory that was given back",
    BATCH: "a token has the same bits alone, among others, on another rank",
    TOPOLOGY: "the same tokens have the same bits on other ranks, or a rounding point is declared",
}
AT_TWICE = "at twice these, 95 of 100 are flagged"
_DETERMINISM = "asked of one mode whose sums round, where a token is there and nothing is wrong"
WHY_NOT_ASKED = {
    RERUN: _DETERMINISM,
    BATCH: _DETERMINISM,
    TOPOLOGY: _DETERMINISM,
    DISTRIBUTION: "asked of GEMMs that round to nearest, of inputs that are not made to be exact",
    EXACT: "inputs of this mode are not made to be exact",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a check came to that found nothing, in words of its own."""

    verdict: CheckVerdict
    detail: str


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ModeRun:
    """One forward of all ranks and what the verdict says of it.

    round    which forward on the same buffers, from 0
    diagnoses  what its deviations look like
    answers  what checks have to say for themselves, by name
    also_acted  faults that changed something in forwards whose traces are not kept
    """

    mode: Mode
    round: int = 0
    batch: Batch
    reports: Sequence[RankReport]
    judgement: Judgement
    diagnoses: Mapping[Deviation, Diagnosis] = field(default_factory=dict)
    answers: Mapping[str, Answer] = field(default_factory=dict)
    also_acted: frozenset[str] = frozenset()


def checks_of(runs: Sequence[ModeRun]) -> Iterator[Check]:
    """Every check of one mode's rounds: what it found, or why it was not asked."""
    judgements, mode = [run.judgement for run in runs], runs[0].mode
    ledgers = [judgement.ledger for judgement in judgements]
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
        elif name == EXACT and (unfit := unfit_to_judge(judgements)):
            verdict, detail = CheckVerdict.FAILED, unfit
        elif name in answers:
            verdict, detail = answers[name].verdict, answers[name].detail
        elif not any(name in ledger.asked for ledger in ledgers):
            verdict = CheckVerdict.NOT_APPLICABLE
            detail = WHY_NOT_ASKED.get(name, "nothing of its kind in this run")
            if name == EXACT and mode is Mode.EXACT:
                detail = "asked of no round"
        left_out = dict.fromkeys(
            f"{part.what} ({part.why})"
            for ledger in ledgers
            for part in ledger.not_asked
            if part.check == name
        )
        if name == EXACT:
            left_out |= dict.fromkeys(refusals_of(judgements))
        if left_out:
            detail += f"; left out: {', '.join(left_out)}"
        yield Check(name=name, mode=mode, verdict=verdict, detail=detail)


def extent_of(runs: Sequence[ModeRun]) -> tuple[str, str]:
    """What an ``agree`` speaks of, and what of a trace it could not judge, in words."""
    ledgers = [run.judgement.ledger for run in runs]
    named = {part.what.partition("/")[0] for ledger in ledgers for part in ledger.not_asked}
    open_ends = [stage for stage in Stage if stage in named]
    if not open_ends:
        return "every stage", ""
    compared = {stage for ledger in ledgers for stage, _ in ledger.worst}
    parts = [f"{stage} in part" if stage in compared else stage for stage in open_ends]
    judged = [stage for stage in Stage if stage in compared]
    return ", ".join(judged), f"; not judged: {', '.join(parts)}"


def beyond_a_gap(runs: Sequence[ModeRun]) -> str | None:
    """What an ``agree`` of stages apart would hide; None: nothing.

    Stages that agree each on its own input say nothing of what lies between them. Where something
    does and was not captured, values that are farther from the golden's than the recipe's own
    rounding takes them are wrong somewhere, though nobody can say where.
    """
    _, left_out = extent_of(runs)
    if not left_out:
        return None
    for run in runs:
        for stage, distance in run.judgement.end_to_end.distances.items():
            is_behind = stage.position >= Stage.GEMM1.position  # before, recipes round nothing
            if is_behind and distance.run_to_same_recipe > distance.same_recipe_to_ideal:
                ours, recipe = distance.run_to_same_recipe, distance.same_recipe_to_ideal
                return (
                    f"what leads to {stage}: its values are {ours:.3g} from the golden's, where "
                    f"the recipe costs {recipe:.3g}; what was captured agrees by itself{left_out}"
                )
    return None


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
    compared, sights = {stage for stage, _ in ledger.worst}, sight_of(ledger)
    for stage in Stage:
        sight = sights.get(stage, NOTHING_SEEN)
        note = "moved or coded: any changed bit" if stage in compared else "nothing was compared"
        if stage in ledger.banded:
            note = "no cell that a band bounds" if sight.cell is None else AT_TWICE
        if stage in ledger.unbounded:
            note += f"; {ledger.unbounded[stage]} cells may overflow and have no band"
        note += exact_note(run.judgement.certificate, stage)
        yield Visibility(
            mode=run.mode,
            stage=stage,
            smallest_relative_effect=sight.cell,
            of_a_row=sight.row,
            of_a_rank=sight.by_kind.get(Kind.RANK),
            of_an_expert=sight.by_kind.get(Kind.EXPERT),
            of_a_column_block=sight.by_kind.get(Kind.COLUMNS),
            note=note,
        )


def traffic_of(run: ModeRun) -> list[Traffic]:
    """What every collective of one forward moved, group by group, and what it should."""
    calls = [report.calls for report in run.reports]
    of_weights = sum(call.stage == Stage.WEIGHTS for call in calls[0])
    rows = []
    # Ranks that parted ways are the accounts' finding.
    for place, made in enumerate(zip(*calls, strict=False)):
        for group in dict.fromkeys(call.group for call in made):
            call = made[group[0]]
            rows.append(
                Traffic(
                    stage=Stage(call.stage),
                    op=call.op,
                    group=group,
                    payload_bytes=[made[rank].payload_bytes for rank in group],
                    predicted_bytes=_predicted(run, place - of_weights, call),
                )
            )
    return rows


def _predicted(run: ModeRun, place: int, call: CollectiveCall) -> list[int]:
    """Bytes due of each member in the call at a place; none where another call is due there."""
    due = [run.judgement.calls_due[rank] for rank in call.group]
    if not all(0 <= place < len(calls) for calls in due):
        return []
    here = [calls[place] for calls in due]
    same = {(str(one.stage), one.op, one.group) for one in here} == {
        (call.stage, call.op, call.group)
    }
    return [one.payload_bytes for one in here] if same else []


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


def noise_of(run: ModeRun) -> Iterator[NoiseFloor]:
    """What twins differ by, and the run's distance beside it."""
    distances = run.judgement.end_to_end.distances
    for noise in run.judgement.noise:
        distance = distances.get(noise.stage)
        ours = None if distance is None else distance.run_to_same_recipe
        yield NoiseFloor(mode=run.mode, run=ours, **asdict(noise))
