"""Asks every hypothesis about every deviation of a forward, and keeps the one that is believed."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from reports.verdict.captured import NotCapturedError
from reports.verdict.deviation import Breach, Deviation
from reports.verdict.diagnosis.bookkeeping import contract_broken
from reports.verdict.diagnosis.branches import scaled_wrongly, shared_wrongly
from reports.verdict.diagnosis.case import Case, Scene, evidence_of
from reports.verdict.diagnosis.choice import chosen_wrongly, masked_rows
from reports.verdict.diagnosis.codes import codes_wrong
from reports.verdict.diagnosis.edges import tail_columns, unwritten_rows
from reports.verdict.diagnosis.explanation import Certainty, Diagnosis, Explanation, believed
from reports.verdict.diagnosis.formulas import other_formulas
from reports.verdict.diagnosis.gathers import gathered_wrongly
from reports.verdict.diagnosis.ids import ids_wrong, sent_to_first_rank
from reports.verdict.diagnosis.matrices import matrices_wrong
from reports.verdict.diagnosis.meeting import experts_met
from reports.verdict.diagnosis.misplaced import misplaced_rows, stale_rows
from reports.verdict.diagnosis.partials import partial_wrong, summed_wrongly
from reports.verdict.diagnosis.parts import parts_of_others, shifted_columns
from reports.verdict.diagnosis.products import halves_exchanged, other_experts
from reports.verdict.diagnosis.routes import routes_lost, weighted_wrongly
from reports.verdict.diagnosis.scale_memory import misread_memory
from reports.verdict.diagnosis.scales import scales_wrong
from reports.verdict.diagnosis.selection import chosen_twice, other_entries, scores_are_none
from reports.verdict.diagnosis.shape import unexplained
from reports.verdict.diagnosis.slot_weights import weights_wrong
from reports.verdict.exact_compared import EXACT

CELLS: Final = 1 << 26
"""Cells that are looked at for the diagnoses of one forward: some ten seconds of one core."""

LEFT_OUT: Final = f"not diagnosed: the findings before it have more than {CELLS >> 20} Mi cells"

Hypothesis = Callable[[Case], Iterator[Explanation]]

HYPOTHESES: Final[Mapping[str, Hypothesis]] = MappingProxyType(
    {
        "scaling factor": scaled_wrongly,
        "shared expert": shared_wrongly,
        "sum over ranks": summed_wrongly,
        "partial": partial_wrong,
        "routes' weights": weighted_wrongly,
        "routes in a sum": routes_lost,
        "stale": stale_rows,
        "misplaced rows": misplaced_rows,
        "gather": gathered_wrongly,
        "parts of rows": parts_of_others,
        "tail columns": tail_columns,
        "shifted columns": shifted_columns,
        "unwritten rows": unwritten_rows,
        "expert's weights": other_experts,
        "halves": halves_exchanged,
        "activation": other_formulas,
        "codes": codes_wrong,
        "scales": scales_wrong,
        "scale memory": misread_memory,
        "prepared weights": matrices_wrong,
        "choice": chosen_wrongly,
        "expert twice": chosen_twice,
        "hash table": other_entries,
        "no numbers": scores_are_none,
        "masked rows": masked_rows,
        "top-k weights": weights_wrong,
        "ids": ids_wrong,
        "first rank": sent_to_first_rank,
        "experts met": experts_met,
    }
)
"""Each is silent about what it does not know; of those that speak one is believed."""


def diagnose(scene: Scene) -> dict[Deviation, Diagnosis]:
    """A diagnosis for every deviation that the ledger holds, in the order of blame.

    Costs nothing where there is none, and only so much where there are many: the first one has its
    diagnosis whatever its size, the others as long as all have no more than ``CELLS``.
    """
    found: dict[Deviation, Diagnosis] = {}
    cells = 0
    for deviation in scene.ledger.deviations:
        cells += _size(scene, deviation)
        is_due = cells <= CELLS or not found
        found[deviation] = _diagnosis(scene, deviation) if is_due else Diagnosis(words=LEFT_OUT)
    return {deviation: _of_its_place(deviation, found) for deviation in found}


def _size(scene: Scene, deviation: Deviation) -> int:
    """Cells of its rank's part of the comparison; 0 of a broken contract."""
    evidence = scene.ledger.evidence.get(deviation)
    if evidence is None:
        return 0
    return int((evidence.rows.rank == deviation.rank).sum()) * evidence.got.shape[1]


def _of_its_place(deviation: Deviation, found: Mapping[Deviation, Diagnosis]) -> Diagnosis:
    """Its own, unless the place says more.

    Scales of a form that is not read are that, whatever law their numbers seem to follow. Certified
    cells have the diagnosis of the first own error of their stage and rank, if need be.
    """
    own = found[deviation]
    for other, one in found.items():
        is_there = (other.stage, other.rank) == (deviation.stage, deviation.rank)
        is_of_it = deviation.tensor in (other.tensor, f"{other.tensor}_scale")
        if is_there and is_of_it and other.breach is Breach.FORM_OF_SCALES:
            return own if own.certainty is Certainty.HIGH else one
    if own.mistake is not None or deviation.check != EXACT:
        return own
    place = deviation.stage, deviation.rank
    said = (one for other, one in found.items() if (other.stage, other.rank) == place)
    return next((one for one in said if one.mistake is not None), own)


def _diagnosis(scene: Scene, deviation: Deviation) -> Diagnosis:
    """Of one deviation; a broken contract borrows the same tensor's values, if they deviate.

    Lost bits have none: the forward that they are compared with is as right as this one.
    """
    if deviation.check.startswith("determinism"):  # another forward's values are not due
        return Diagnosis(words=unexplained(deviation, None))
    case = case_of(scene, deviation)
    if deviation in scene.ledger.evidence and case is not None:
        return _of_values(case)
    found = believed(_broken(scene, deviation))
    if found is None and case is not None:
        borrowed = _of_values(case)
        found = None if borrowed.mistake is None else borrowed
    return found or Diagnosis(words=unexplained(deviation, None))


def case_of(scene: Scene, deviation: Deviation) -> Case | None:
    """A deviation with values: its own, or those that another check has of the same tensor.

    What a band was laid on says more than what only had to be equal. Rows of another width than is
    due have no values to be told apart.
    """
    names = (deviation.tensor, f"{deviation.tensor}_scale")
    found = evidence_of(scene.ledger, deviation.stage, deviation.rank, names)
    own = scene.ledger.evidence.get(deviation)
    if own is not None:
        found = [(deviation, own), *(one for one in found if one[0].tensor == deviation.tensor)]
    found = [one for one in found if one[1].got.shape == one[1].want.shape]
    banded = [one for one in found if bool((one[1].band > 0).any())]
    return Case(scene, *(banded or found)[0]) if found else None


def _of_values(case: Case) -> Diagnosis:
    """By every hypothesis."""
    asked = [one for hypothesis in HYPOTHESES.values() for one in _asked(hypothesis, case)]
    found = believed([one for said in asked for one in _weighed(case, said)])
    return found or Diagnosis(words=unexplained(case.deviation, case))


def _weighed(case: Case, said: Explanation) -> Iterator[Explanation]:
    """With its evidence: if it does not say, that of the wrong cells that it explains.

    Where those are no more than its choices would fit by luck, nothing is said.
    """
    if said.evidence is not None:
        yield said
    elif said.share > 1 / 2:
        weighed = replace(said, evidence=case.bits_of(said.explains))
        if weighed.is_guess or weighed.surplus > 0:
            yield weighed


def _broken(scene: Scene, deviation: Deviation) -> list[Explanation]:
    """What a broken contract alone says; nothing where the trace lacks what it is about."""
    try:
        return list(contract_broken(scene, deviation))
    except NotCapturedError:
        return []


def _asked(hypothesis: Hypothesis, case: Case) -> list[Explanation]:
    """What a hypothesis says; nothing where the trace lacks what it would look at."""
    try:
        return list(hypothesis(case))
    except NotCapturedError:
        return []
