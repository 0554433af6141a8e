"""The cells of one comparison: both sides, the band, and what is said of the worst."""

import math
from dataclasses import dataclass, replace
from typing import TypedDict

import torch
from torch import Tensor

from reports.verdict.decode import BLOCK
from reports.verdict.evidence import Evidence, cells_of, few_rows, places_in_rank
from reports.verdict.quantiser_note import QuantiserNote
from reports.verdict.rows import Rows, distinct


class Place(TypedDict):
    """The part of a deviation that a cell fills in."""

    ratio: float
    columns: tuple[int, int] | None
    got: float
    want: float
    band: float


@dataclass(frozen=True, slots=True)
class Cells:
    """Both sides of a comparison, [N, C] float64 each; of codes, or of values that have a size."""

    got: Tensor
    want: Tensor
    band: Tensor
    ratio: Tensor
    is_code: bool = False

    def relative_error(self, here: Tensor) -> str:
        """Of the wrong rows among ``here``, as a whole, in words; empty where one is no number.

        Also of codes and ids, which are no magnitudes.
        """
        if self.is_code:
            return ""
        wrong = here[(self.ratio[here] > 1).any(1)]
        error = (self.got[wrong] - self.want[wrong]).norm() / self.want[wrong].norm()
        return f"relative error of those rows: {float(error):.2g}" if error.isfinite() else ""

    def evidence(self, rows: Rows, note: QuantiserNote | None, room: int) -> Evidence:
        """All of them, for a diagnosis; or, if half of the room is too little, a few rows."""
        row_worst, place = self.ratio.max(dim=1).values, places_in_rank(rows)
        compared = {rank: int((rows.rank == rank).sum()) for rank in distinct(rows.rank)}
        wrong_rows, size = rows[(row_worst > 1).nonzero()[:, 0]], cells_of(self.got, note)
        whole = Evidence(
            rows=rows,
            got=self.got,
            want=self.want,
            band=self.band,
            wrong=self.ratio > 1,
            place=place,
            compared=compared,
            wrong_rows=wrong_rows,
            quantiser=note,
        )
        if size <= room // 2:
            return whole
        kept = few_rows(rows, row_worst, room // 2 // max(size // len(rows), 1))
        return replace(
            whole,
            rows=rows[kept],
            got=self.got[kept],
            want=self.want[kept],
            band=self.band[kept],
            wrong=whole.wrong[kept],
            place=place[kept],
            quantiser=None if note is None else note.at(kept),
        )

    def at(self, row: int, column: int) -> Place:
        """One cell, with the columns around it that may share a scale."""
        first = column // BLOCK * BLOCK
        return Place(
            ratio=float(self.ratio[row, column]),
            columns=(first, min(first + BLOCK, self.got.shape[1])),
            got=float(self.got[row, column]),
            want=float(self.want[row, column]),
            band=float(self.band[row, column]),
        )


def error_over_band(got: Tensor, want: Tensor, band: Tensor) -> Tensor:
    """|got - want| / band; infinite where only one of them is a number.

    0 where both are equal, where neither is a finite number and one is none at all (an infinity
    that met another, in another order of operations), and under an infinite band: what may
    overflow may become anything.
    """
    ratio = (got - want).abs_().div_(band)
    if all_finite(ratio):
        return ratio
    neither_finite = ~got.isfinite() & ~want.isfinite()
    same = (
        (got == want)
        | (neither_finite & (got.isnan() | want.isnan()))
        | (band.isinf() & want.isfinite())
    )
    return ratio.nan_to_num_(nan=torch.inf, posinf=torch.inf).masked_fill_(same, 0.0)


def all_finite(values: Tensor) -> bool:
    """Whether every cell is a finite number.

    A sum that is one says so at a tenth of the cost of looking at every cell.
    """
    return math.isfinite(float(values.sum())) or bool(values.isfinite().all())
