"""Parts of rows that hold the same part of another row, or another part of their own."""

from collections.abc import Iterator
from typing import Final

from torch import Tensor

from moe.mistakes import Mistake
from reports.verdict.diagnosis.case import Case
from reports.verdict.diagnosis.content import Table, identify, listed, name_of
from reports.verdict.diagnosis.explanation import Explanation, bits_of_choice
from reports.verdict.diagnosis.misplaced import limits_of

PART: Final = 32
"""Columns that are moved together: the smallest group that has a scale of its own."""


def parts_of_others(case: Case) -> Iterator[Explanation]:
    """The wrong columns of a row are those of another row of that tensor."""
    part = _part(case)
    if part is None:
        return
    got, rows = case.got[:, part], case.evidence.rows
    low, high = (limits[:, part] for limits in limits_of(case.evidence))

    def same(which: Tensor, candidate: Tensor) -> Tensor:
        return _fits(got[which], low[candidate], high[candidate])

    match = identify(got, Table(values=case.evidence.want[:, part], rows=rows), same)
    found = match.is_found & (match.row != case.here)
    said = [
        f"{name_of(case.rows, at)} holds those of {name_of(rows, int(match.row[at]), case.rank)}"
        for at in found.nonzero()[:, 0].tolist()
    ]
    yield Explanation(
        mistake=Mistake.ROWS_MISPLACED,
        words=f"columns {part.start}..{part.stop - 1} are another row's: {listed(said)}",
        explains=found,
        cost=_cost_of_part(case) + bits_of_choice(len(rows), len(said)),
    )


def shifted_columns(case: Case) -> Iterator[Explanation]:
    """The wrong columns hold what is due so many columns further on, or before."""
    part = _part(case)
    if part is None:
        return
    limits, width = limits_of(case.evidence), case.got.shape[1]
    low, high = (one[case.here] for one in limits)
    starts = [at for at in range(0, width - part.stop + part.start + 1, PART) if at != part.start]
    for start in starts:
        source = slice(start, start + part.stop - part.start)
        explains = _fits(case.got[:, part], low[:, source], high[:, source])
        if bool(explains.any()):
            yield Explanation(
                mistake=Mistake.TAIL_COLUMNS,
                words=f"columns {part.start}..{part.stop - 1} hold what is due in columns "
                f"{source.start}..{source.stop - 1} of the same row",
                explains=explains,
                cost=_cost_of_part(case) + bits_of_choice(len(starts)),
            )


def _part(case: Case) -> slice | None:
    """The columns from the first to the last wrong one, in whole groups; None: all of them."""
    if not case.holds_rows or not len(case.here):
        return None
    columns, width = case.wrong.any(0).nonzero()[:, 0], case.got.shape[1]
    first = int(columns[0]) // PART * PART
    last = min(-(-(int(columns[-1]) + 1) // PART) * PART, width)
    return slice(first, last) if last - first < width else None


def _cost_of_part(case: Case) -> float:
    """Any group of columns may be the first, and any the last."""
    return bits_of_choice(-(-case.got.shape[1] // PART), 2)


def _fits(got: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """[W] bool: every cell within its limits, or none where none is due."""
    return (((got >= low) & (got <= high)) | (got.isnan() & low.isnan())).all(1)
