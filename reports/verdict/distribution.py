"""Whether steps next to rounding boundaries lean to one side: small errors that no cell shows.

It is asked of GEMMs that round to nearest: the sign of such a sum's error is taken to be drawn anew
for each unit, a row inside a block of columns. Under that assumption alone, whatever the size and
number of steps, the sum S of a group's units exceeds ``sqrt(2 L * sum of squares)`` with a
probability of at most ``exp(-L)`` (Hoeffding).

It is not asked where many cells may have one error, nor is anything lost there: behind one or two
roundings of numbers with few digits (a factor times a bf16 value), behind an activation whose exp
vanishes beside 1, or behind a sum that is cut off, all of the declared error may have one sign. As
many cells as have a boundary within it may then step, which is what the rule of stores allows.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from moe.formats import Stage
from reports.verdict.decode import BLOCK
from reports.verdict.deviation import Deviation
from reports.verdict.ledger import Ledger
from reports.verdict.tallies import Group, Kind, Tally

DISTRIBUTION: Final = "band: distribution"

FALSE_ALARMS: Final = 1e-6
"""A forward without a mistake is reported with at most this probability, if signs are drawn."""

DIRECTIONS: Final = 4
"""Questions to a group: away from zero, towards it, up, down."""

RELATIVE_STEP: Final = 2.0**-7.5
"""A step of bf16 is between 2^-8 and 2^-7 of a value."""


def check_distribution(ledger: Ledger, evidence: float | None = None) -> None:
    """Enter each tensor whose steps lean further than chance allows.

    ``evidence`` is that of a whole forward; None: the ledger has one.
    """
    evidence = evidence_needed(ledger) if evidence is None else evidence
    for (stage, tensor), tally in ledger.tallies.items():
        if tally.signs_are_drawn and not tally.spoiled:
            ledger.ask(DISTRIBUTION)
            leans = sorted(_leans(tally, evidence), key=lambda lean: -lean.ratio)
            if leans and leans[0].ratio > 1:
                worst = _narrowest(leans, tally, evidence)
                ledger.report(_deviation(stage, tensor, tally, worst, leans))


def evidence_needed(ledger: Ledger) -> float:
    """L, so that all groups of all tensors together raise ``FALSE_ALARMS`` at most."""
    asked = [tally for tally in ledger.tallies.values() if tally.signs_are_drawn]
    questions = sum(DIRECTIONS * len(tally.sums) for tally in asked)
    return math.log(max(questions, 1) / FALSE_ALARMS)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lean:
    """One group's sum in one direction, that of its units' squares, and the former over chance."""

    group: Group
    outward: bool
    total: float
    squares: float
    ratio: float


def _leans(tally: Tally, evidence: float) -> Iterator[_Lean]:
    for group, sums in tally.sums.items():
        for outward, total, squares in (
            (True, sums.outward, sums.outward_squares),
            (False, sums.upward, sums.upward_squares),
        ):
            yield _Lean(
                group=group,
                outward=outward,
                total=total,
                squares=squares,
                ratio=_over_chance(total, squares, evidence),
            )


def _over_chance(total: float, squares: float, evidence: float) -> float:
    """|Sum of units| over what chance leaves to it."""
    return abs(total) / math.sqrt(2 * evidence * squares) if total else 0.0


def _narrowest(leans: list[_Lean], tally: Tally, evidence: float) -> _Lean:
    """The worst of ``leans``, which are sorted, or the one expert that makes a rank lean."""
    worst = leans[0]
    for lean in leans if worst.group.kind is Kind.RANK else ():
        is_on_it = tally.rank_of[lean.group] == worst.group.number
        if lean.group.kind is Kind.EXPERT and is_on_it and lean.outward is worst.outward:
            rest = worst.total - lean.total, max(worst.squares - lean.squares, 0.0)
            is_quiet = rest[1] > 0 and _over_chance(*rest, evidence) <= 1
            return lean if lean.ratio > 1 and is_quiet else worst
    return worst


def _deviation(
    stage: Stage, tensor: str, tally: Tally, worst: _Lean, leans: list[_Lean]
) -> Deviation:
    """The worst of ``leans``, which are sorted; columns are blamed on the rank that leans most."""
    kind, number = worst.group
    on_ranks = (lean.group.number for lean in leans if lean.group.kind is Kind.RANK)
    first = number * BLOCK
    columns = (first, min(first + BLOCK, tally.columns))
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
        first = number * BLOCK
        where = f"columns {first} to {min(first + BLOCK, tally.columns) - 1}"
    leaning = {lean.group for lean in found}
    others = ", ".join(
        f"{sum(group.kind is kind for group in leaning)} of "
        f"{sum(group.kind is kind for group in tally.sums)} {kind}s"
        for kind in Kind
        if any(group.kind is kind for group in leaning)
    )
    rows, width = tally.shape_of(worst.group)
    steps, cells = abs(worst.total), rows * width
    return (
        f"stored values of {where} lean {way} by {steps:.0f} steps in {cells} cells, as much as an "
        f"error of {steps / cells * RELATIVE_STEP:.1g} of each makes; {worst.ratio:.2g} times what "
        f"is allowed; so do {others}"
    )
