"""Whether steps next to rounding boundaries lean to one side: small errors that no cell shows.

Errors of sums that round to nearest have no preferred sign. Under that assumption alone, whatever
the size and number of steps, the sum S of a group's units exceeds ``sqrt(2 L * sum of squares)``
with a probability of at most ``exp(-L)`` (Hoeffding, for signs that are drawn independently).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from moe.formats import Stage
from reports.verdict.ledger import Deviation, Ledger
from reports.verdict.stores import leaning_of_a_constant
from reports.verdict.tallies import SCALED_COLUMNS, Group, Kind, Sums, Tally

DISTRIBUTION: Final = "band: distribution"

FALSE_ALARMS: Final = 1e-6
"""A forward without a mistake is reported with at most this probability."""

DIRECTIONS: Final = 4
"""Questions to a group: away from zero, towards it, up, down."""


def check_distribution(ledger: Ledger, evidence: float | None = None) -> None:
    """Enter each tensor whose steps lean further than chance and its declared errors allow.

    ``evidence`` is that of a whole forward; None: the ledger has one.
    """
    evidence = evidence_needed(ledger) if evidence is None else evidence
    for (stage, tensor), tally in ledger.tallies.items():
        if tally.stored and not tally.spoiled:
            ledger.ask(DISTRIBUTION)
            leans = sorted(_leans(tally, evidence), key=lambda lean: -lean.ratio)
            if leans and leans[0].ratio > 1:
                ledger.report(_deviation(stage, tensor, tally, leans))


def evidence_needed(ledger: Ledger) -> float:
    """L, so that all groups of all tensors together raise ``FALSE_ALARMS`` at most."""
    questions = sum(DIRECTIONS * len(tally.sums) for tally in ledger.tallies.values())
    return math.log(max(questions, 1) / FALSE_ALARMS)


def allowed(sums: Sums, squares: float, evidence: float) -> float:
    """Largest sum of steps that chance and declared errors of one sign leave to a group."""
    leaning = sums.leaning + leaning_of_a_constant(sums.cells)
    return leaning + math.sqrt(2 * evidence * squares)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lean:
    """One group's sum in one direction, over what is allowed."""

    group: Group
    outward: bool
    total: float
    cells: int
    ratio: float


def _leans(tally: Tally, evidence: float) -> Iterator[_Lean]:
    for group, sums in tally.sums.items():
        for outward, total, squares in (
            (True, sums.outward, sums.outward_squares),
            (False, sums.upward, sums.upward_squares),
        ):
            ratio = abs(total) / allowed(sums, squares, evidence)
            yield _Lean(group=group, outward=outward, total=total, cells=sums.cells, ratio=ratio)


def _deviation(stage: Stage, tensor: str, tally: Tally, leans: list[_Lean]) -> Deviation:
    """The worst of ``leans``, which are sorted; columns are blamed on the rank that leans most."""
    worst, (kind, number) = leans[0], leans[0].group
    on_ranks = (lean.group.number for lean in leans if lean.group.kind is Kind.RANK)
    first = number * SCALED_COLUMNS
    columns = (first, min(first + SCALED_COLUMNS, tally.columns))
    return Deviation(
        check=DISTRIBUTION,
        stage=stage,
        rank=next(on_ranks) if kind is Kind.COLUMNS else tally.rank_of[worst.group],
        tensor=tensor,
        ratio=worst.ratio,
        expert=number if kind is Kind.EXPERT else None,
        columns=columns if kind is Kind.COLUMNS else None,
        detail=_words(worst, tally, [lean for lean in leans if lean.ratio > 1]),
    )


def _words(worst: _Lean, tally: Tally, found: list[_Lean]) -> str:
    up = worst.total > 0
    way = ("away from zero" if up else "towards zero") if worst.outward else "up" if up else "down"
    kind, number = worst.group
    where = f"{kind} {number}"
    if kind is Kind.COLUMNS:
        first = number * SCALED_COLUMNS
        where = f"columns {first} to {min(first + SCALED_COLUMNS, tally.columns) - 1}"
    leaning = {lean.group for lean in found}
    others = ", ".join(
        f"{sum(group.kind is kind for group in leaning)} of "
        f"{sum(group.kind is kind for group in tally.sums)} {kind}s"
        for kind in Kind
        if any(group.kind is kind for group in leaning)
    )
    return (
        f"stored values of {where} lean {way} by {abs(worst.total):.0f} steps in {worst.cells} "
        f"cells, {worst.ratio:.2g} times what is allowed; so do {others}"
    )
