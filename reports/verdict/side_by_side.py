"""Compares two judged runs of one token list: which bits differ, why, how far apart they are."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reports.comparison import Comparison, Likeness
from reports.record import Mode, Verdict
from reports.verdict.canonical import CanonicalForward
from reports.verdict.certified_bits import (
    CertainValues,
    certified_output,
    certified_parting,
)
from reports.verdict.topology_bits import (
    DeclaredParting,
    Parting,
    declared_parting,
    first_parting,
    is_declared,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Distances:
    """Relative Frobenius distances of an output; ``size`` is the norm of the golden's own.

    from_golden  from its same-recipe golden
    from_ideal   from the golden without any rounding
    """

    size: float
    from_golden: float
    from_ideal: float


def distances(output: Tensor, golden: Tensor, ideal: Tensor) -> Distances:
    """Of an output from both goldens, [T, H] each.

    Args:
        output: bf16, of the run.
        golden: float64, same recipe.
        ideal: float64, without any rounding.
    """
    whole, size = output.to(torch.float64), float(golden.norm())
    return Distances(
        size=size,
        from_golden=_relative(whole - golden, size),
        from_ideal=_relative(whole - ideal, float(ideal.norm())),
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Side:
    """One of two runs, in one mode.

    verdict    of the run
    summary    its sentence
    distances  of its output from both goldens
    certain    what exact mode certifies of it; None in other modes, and where no trace was kept
    """

    name: str
    mode: Mode
    verdict: Verdict
    summary: str
    forward: CanonicalForward
    distances: Distances
    certain: CertainValues | None = None


def side_by_side(one: Side, other: Side) -> Comparison:
    """Compare two runs of the same tokens.

    Bits say little once they may differ; whether a run is right is its own verdict. In exact mode
    they may not: cells that both certify to hold the same value are compared, and no others.
    """
    declared = declared_parting(one.forward.layer, other.forward.layer)
    mine, theirs = (side.forward.output.to(torch.float64) for side in (one, other))
    differs = ~((mine == theirs) | (mine.isnan() & theirs.isnan()))
    if one.certain is not None and other.certain is not None:
        certain = (one.certain, other.certain)
        parting = certified_parting(one.forward, other.forward, certain)
        likeness, reason = _likeness_of_certified(one, other, parting)
        differs = differs[certified_output(certain)]
    else:
        parting = first_parting(one.forward, other.forward)
        likeness, reason = _likeness(one, other, parting, declared)
    return Comparison(
        one=one.name,
        other=other.name,
        mode=one.mode,
        likeness=likeness,
        cells=int(differs.sum()),
        num_cells=differs.numel(),
        apart=_relative(mine - theirs, one.distances.size),
        one_from_golden=one.distances.from_golden,
        other_from_golden=other.distances.from_golden,
        one_from_ideal=one.distances.from_ideal,
        other_from_ideal=other.distances.from_ideal,
        declared=declared.stage if declared else None,
        reason=reason,
        **_first_cell(parting),
    )


def _likeness(
    one: Side, other: Side, parting: Parting | None, declared: DeclaredParting | None
) -> tuple[Likeness, str]:
    """What the difference means, and why."""
    wrong = [side for side in (one, other) if side.verdict is not Verdict.AGREE]
    if wrong:
        return Likeness.BREAKS, "; ".join(f"{side.name}: {side.summary}" for side in wrong)
    if parting is None:
        return Likeness.SAME_BITS, declared.reason if declared else "nothing lets them differ"
    if declared is not None and is_declared(parting, declared):
        return Likeness.ROUNDING, declared.reason
    return Likeness.BREAKS, f"nothing that is declared lets {parting.stage} differ"


def _likeness_of_certified(one: Side, other: Side, parting: Parting | None) -> tuple[Likeness, str]:
    """The same of cells that no order of a sum can change."""
    where = ""
    if parting is not None:
        rank = "" if parting.rank is None else f" on rank {parting.rank} of {other.name}"
        where = f"certified cells of {parting.tensor} differ in {parting.stage}{rank}"
        where += f", first for token {parting.token}"
    wrong = [side for side in (one, other) if side.verdict is not Verdict.AGREE]
    if wrong:
        said = [*([where] if where else []), *(f"{side.name}: {side.summary}" for side in wrong)]
        return Likeness.BREAKS, "; ".join(said)
    if parting is None:
        return Likeness.SAME_BITS, "every cell that both certify is the same"
    return Likeness.BREAKS, where


def _first_cell(parting: Parting | None) -> dict[str, Any]:
    if parting is None:
        return {}
    return {
        "stage": parting.stage,
        "tensor": parting.tensor,
        "rank": parting.rank,
        "token": parting.token,
        "slot": parting.slot,
        "column": parting.column,
        "one_value": parting.one,
        "other_value": parting.other,
    }


def _relative(difference: Tensor, whole: float) -> float:
    """Frobenius norm over another one; 0 where nothing differs, infinite if the other is 0."""
    size = float(difference.norm())
    if not size:
        return 0.0
    return size / whole if whole else math.inf
