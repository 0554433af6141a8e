"""Grouped rows that meet no expert, or another than theirs."""

import math
from collections.abc import Iterator

from moe.formats import Stage
from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import listed, name_of
from reports.verdict.diagnosis.explanation import Explanation


def experts_met(case: Case) -> Iterator[Explanation]:
    """By the slot that a row is multiplied with, and the one that is due."""
    if (case.stage, case.tensor) != (Stage.PRE_PERMUTE, "rows"):
        return
    got, want = case.got[:, 0], case.want[:, 0]
    outside = got < 0
    names = [name_of(case.rows, at) for at in outside.nonzero()[:, 0].tolist()]
    yield Explanation(
        mistake=Mistake.COUNTS,
        words=f"rows not counted, so no expert computes them: {listed(names)}",
        explains=outside,
        evidence=math.inf,
    )
    experts = case.layer.local_experts(case.rank)
    is_other = (got >= 0) & (got < len(experts)) & (got != want)
    said = [
        f"{name_of(case.rows, at)} meets expert {experts[int(got[at])]}, due "
        f"{experts[int(want[at])]}"
        for at in is_other.nonzero()[:, 0].tolist()
    ]
    yield Explanation(
        mistake=Mistake.WRONG_EXPERT,
        words=f"rows multiplied with another expert's weights: {listed(said)}",
        explains=is_other,
        evidence=math.inf,
    )
