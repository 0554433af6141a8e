"""Whose row is this? Rows named by what they hold, bit for bit or within a band."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from reports.verdict.rows import Rows

NEAREST: Final = 4
"""Candidates that a row is held against, nearest first; only a match counts."""

NAMED: Final = 3
"""Rows that a sentence names; it counts the others."""

Same = Callable[[Tensor, Tensor], Tensor]
"""([N] which of some rows, [N] which of a table's rows) -> [N] bool: the one is the other."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Table:
    """Rows that a misplaced row may be.

    values  [M, C] float64
    rows    their coordinates; a row without a token is padding
    """

    values: Tensor
    rows: Rows


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Match:
    """What some rows turned out to be.

    row           [W] int64 row of the table, -1 = none
    is_ambiguous  [W] bool: the table holds that row more than once, of different tokens
    """

    row: Tensor
    is_ambiguous: Tensor

    @property
    def is_found(self) -> Tensor:
        """[W] bool."""
        return self.row >= 0


def identify(rows: Tensor, table: Table, same: Same | None = None) -> Match:
    """Find rows [W, C] float64 in a table by their content.

    Tokens that carry a mark of their own and tokens that are merely random are told apart alike:
    by every value of a row. NaN is equal to NaN.

    Args:
        rows: to be named.
        table: what they may be.
        same: whether a row may be one of the table; None: all its values are equal.
    """
    if not rows.numel() or not table.values.numel():
        nothing = torch.full((len(rows),), -1)
        return Match(row=nothing, is_ambiguous=nothing >= 0)
    return _equal(rows, table) if same is None else _near(rows, table, same)


def _equal(rows: Tensor, table: Table) -> Match:
    """By the bytes of whole rows."""
    places: dict[bytes, list[int]] = {}
    for at, row in enumerate(_bytes_of_rows(table.values)):
        places.setdefault(row, []).append(at)
    tokens = table.rows.token.tolist()
    known = {row: (one[0], len({tokens[at] for at in one}) > 1) for row, one in places.items()}
    found = [known.get(row, (-1, False)) for row in _bytes_of_rows(rows)]
    return Match(
        row=torch.tensor([row for row, _ in found]),
        is_ambiguous=torch.tensor([is_ambiguous for _, is_ambiguous in found]),
    )


def _bytes_of_rows(rows: Tensor) -> list[bytes]:
    """One string for each row; zeros have no sign in it, and NaN is one value."""
    plain = (rows + 0.0).masked_fill(rows.isnan(), torch.nan)
    return [row.tobytes() for row in plain.cpu().numpy()]


def _near(rows: Tensor, table: Table, same: Same) -> Match:
    """By a rule, among the nearest rows."""
    near = _nearest(rows, table.values)
    each = torch.arange(len(rows))
    fits = torch.stack([same(each, candidate) for candidate in near.T], dim=1)
    first = near.gather(1, fits.int().argmax(dim=1, keepdim=True))[:, 0]
    is_found = fits.any(1)
    of_token = table.rows.token[near]
    differs = fits & (of_token != table.rows.token[first][:, None])
    return Match(row=torch.where(is_found, first, -1), is_ambiguous=is_found & differs.any(1))


def _nearest(rows: Tensor, values: Tensor) -> Tensor:
    """[W, N] int64 rows of ``values`` nearest to each row, the nearest first.

    Distances come from one product; columns are brought to one size first, so that no large
    column, and no number that is none, decides alone.
    """
    unit = (
        values.nan_to_num(0.0, 0.0, 0.0).abs().amax(dim=0).clamp_min(torch.finfo(rows.dtype).tiny)
    )
    limit = 2.0  # of a value that is in no row of the table
    mine = (rows / unit).nan_to_num(limit, limit, -limit).clamp(-limit, limit)
    theirs = (values / unit).nan_to_num(limit, limit, -limit).clamp(-limit, limit)
    distance = (theirs * theirs).sum(1) - 2 * (mine @ theirs.T)
    return distance.topk(min(NEAREST, len(values)), dim=1, largest=False).indices


def name_of(rows: Rows, at: int, rank: int | None = None) -> str:
    """A row by its token and slot, with its rank where that is another than ``rank``.

    A row of a matrix has no token: its number stands in ``slot``.
    """
    token, slot, expert = (int(axis[at]) for axis in (rows.token, rows.slot, rows.expert))
    if token < 0 and slot >= 0:
        return f"row {slot}" + (f" of expert {expert}" if expert >= 0 else "")
    name = f"token {token}" if token >= 0 else "padding"
    name += f" slot {slot}" if slot >= 0 else ""
    other = int(rows.rank[at])
    return name + (f" of rank {other}" if rank is not None and other not in (rank, -1) else "")


def listed(names: list[str]) -> str:
    """The first few names, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")
