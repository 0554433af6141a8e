"""Both sides of a comparison that failed: kept for a diagnosis, and only where something failed.

A comparison is kept whole while it takes no more than half of the room that a ledger has left.
Beyond that a few rows of each rank are kept: the worst, the first of the other wrong ones, and
some that are right.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from reports.verdict.quantiser_note import QuantiserNote
from reports.verdict.rows import Rows, distinct

ROOM: Final = 1 << 24
"""Cells that the evidence of one ledger may have, a row of each rank and comparison aside; each of
them takes 25 bytes, 24 more of a quantiser."""

WRONG_ROWS, RIGHT_ROWS = 8, 2
"""Of each rank, of a comparison that is too large to be kept whole."""

_SIDES_OF_QUANTISER: Final = 2
"""Its codes and what is due in front of them take as much room again as what was compared."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Evidence:
    """What a comparison saw, of all ranks that it compared at once.

    rows        coordinates of N rows
    got, want   [N, C] float64
    band        [N, C] float64, largest error allowed; 0 where values have to be equal
    wrong       [N, C] bool
    place       [N] int64, which of its rank's compared rows each of them is
    compared    rank -> how many of its rows were compared
    wrong_rows  coordinates of all rows that are wrong, kept or not
    quantiser   the codes and scales that it belongs to, where it is of a quantiser
    local       slot of the rank that holds it, where it is a matrix of an expert
    """

    rows: Rows
    got: Tensor
    want: Tensor
    band: Tensor
    wrong: Tensor
    place: Tensor
    compared: Mapping[int, int]
    wrong_rows: Rows
    quantiser: QuantiserNote | None = None
    local: int | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> "Evidence":
        """Nobody writes into it, so copies of a ledger share it."""
        return self

    @property
    def size(self) -> int:
        """Cells that it takes of the room."""
        return cells_of(self.got, self.quantiser)


def free_room() -> int:
    """Cells that the evidence of a new ledger may have."""
    return ROOM


def cells_of(compared: Tensor, note: QuantiserNote | None) -> int:
    """Cells that a whole comparison would take."""
    return compared.numel() + (0 if note is None else _SIDES_OF_QUANTISER * note.codes.numel())


def places_in_rank(rows: Rows) -> Tensor:
    """[N] int64: the how manieth row of its rank each row is."""
    place = torch.zeros_like(rows.rank)
    for rank in distinct(rows.rank):
        here = (rows.rank == rank).nonzero()[:, 0]
        place[here] = torch.arange(len(here))
    return place


def few_rows(rows: Rows, row_worst: Tensor, most: int) -> Tensor:
    """Places of the rows that are kept of a comparison which is too large, ascending.

    Args:
        rows: coordinates of the N rows compared.
        row_worst: [N] error / band of each; over 1 is wrong.
        most: cells of one of these rows go into the room so often.
    """
    by_rank = [(rows.rank == rank).nonzero()[:, 0] for rank in distinct(rows.rank)]
    deviating = [here for here in by_rank if bool((row_worst[here] > 1).any())]
    of_each = max(most // len(deviating), 1)
    kept = []
    for here in deviating:
        wrong = here[row_worst[here] > 1]
        worst = here[row_worst[here].argmax()]
        first = torch.cat([worst[None], wrong[wrong != worst]])[: min(WRONG_ROWS, of_each)]
        right = here[row_worst[here] <= 1][: min(RIGHT_ROWS, of_each - len(first))]
        kept += [first, right]
    return torch.cat(kept).sort().values
