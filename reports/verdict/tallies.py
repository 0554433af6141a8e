"""What is kept of the stores of one tensor: signed steps by group, and a sample of its cells."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import Tensor

from reports.verdict.decode import BLOCK
from reports.verdict.rows import Rows

MOST_SLOTS = 1 << 16
"""More than a token ever has."""


class Kind(StrEnum):
    """What cells are grouped by."""

    RANK = "rank"
    EXPERT = "expert"
    COLUMNS = "column block"


class Group(NamedTuple):
    """Cells of one rank, one logical expert or one block of columns."""

    kind: Kind
    number: int


@dataclass(slots=True)
class Sums:
    """Of one group's cells.

    A step is +1 or -1 where a stored value is above or below the one that the golden's value
    rounds to; away from zero counts as outward. Steps of a row inside a block of columns make up
    one unit.

    cells     how many
    units     how many units they make up
    outward   sum of outward steps
    upward    sum of upward steps
    outward_squares, upward_squares  sums over units of the squares of the units' sums
    """

    cells: int = 0
    units: int = 0
    outward: float = 0.0
    upward: float = 0.0
    outward_squares: float = 0.0
    upward_squares: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """Gains that cells of some rows show, [R, S] float64 each; infinite for a cell of zero.

    up, down        above this gain, or loss, a cell leaves what its own rule allows
    step_up, step_down  above this gain, or loss, it is stored one step further; infinite where fp32
                    is kept
    """

    up: Tensor
    down: Tensor
    step_up: Tensor
    step_down: Tensor


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Steps:
    """Where stored values are not the ones that the golden's values round to: F cells.

    row, column  [F] int64
    upward       [F] float64, +1 or -1
    outward      [F] float64, +1 or -1, 0 where the golden's value is 0
    row_keys     [F] int64, equal for equal rows
    """

    row: Tensor
    column: Tensor
    upward: Tensor
    outward: Tensor
    row_keys: Tensor


@dataclass(slots=True)
class Tally:
    """Of one tensor, over the comparisons that it takes.

    sums     by group
    columns  width of a row
    samples  of its cells, one for each comparison
    spoiled  a cell is outside what its own rule allows: groups say nothing more
    stored   bf16 is stored; otherwise fp32 is kept
    signs_are_drawn  steps are counted; otherwise nothing but cells
    rank_of  the first rank that had a row of a group
    """

    columns: int
    stored: bool
    signs_are_drawn: bool = False
    sums: dict[Group, Sums] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    spoiled: bool = False
    rank_of: dict[Group, int] = field(default_factory=dict)
    _seen: set[tuple[int, int]] = field(default_factory=set)
    _places: list[Tensor] = field(default_factory=list)

    def shape_of(self, group: Group) -> tuple[int, int]:
        """Rows of a group, those that ranks have in common once, and columns of each."""
        sums = self.sums[group]
        if group.kind is not Kind.COLUMNS:
            return sums.cells // self.columns, self.columns
        return min(sums.units, self._distinct_rows()), sums.cells // max(sums.units, 1)

    def _distinct_rows(self) -> int:
        """Rows of different (token, slot)."""
        if len(self._places) > 1:
            self._places = [torch.unique(torch.cat(self._places))]
        return sum(len(places) for places in self._places)

    def count(self, rows: Rows) -> None:
        """Enter cells of N rows."""
        self._places.append(torch.unique(rows.token * MOST_SLOTS + rows.slot))
        blocks = _blocks(self.columns)
        for kind, index in ((Kind.RANK, rows.rank), (Kind.EXPERT, rows.expert)):
            order, found, counts = _by_group(index)
            first = rows.rank[order[counts.cumsum(0) - counts]]
            for number, rank, count in zip(
                *map(Tensor.tolist, (found, first, counts)), strict=True
            ):
                sums = self._sums(Group(kind, number), rank)
                sums.cells += count * self.columns
                sums.units += count * blocks
        for block in range(blocks) if len(rows) else ():
            cut = slice(block * BLOCK, (block + 1) * BLOCK)
            sums = self._sums(Group(Kind.COLUMNS, block), int(rows.rank[0]))
            sums.cells += len(rows) * len(range(self.columns)[cut])
            sums.units += len(rows)

    def add(self, rows: Rows, steps: Steps) -> None:
        """Enter steps of N rows; rows that are equal to one before count once in each group."""
        if not len(steps.row):
            return
        new_on_rank, new = self._first_seen(rows, steps)
        blocks = _blocks(self.columns)
        unit, place = torch.unique(steps.row * blocks + steps.column // BLOCK, return_inverse=True)
        row = unit // blocks
        outward, upward = (
            torch.zeros(len(unit), dtype=torch.float64).index_add_(0, place, of)
            for of in (steps.outward, steps.upward)
        )
        for kind, index, counts in (
            (Kind.RANK, rows.rank[row], new_on_rank[row]),
            (Kind.EXPERT, rows.expert[row], new[row]),
            (Kind.COLUMNS, unit % blocks, new[row]),
        ):
            for group, at in _members(kind, index.masked_fill(~counts, -1)):
                sums = self.sums[group]
                sums.outward += float(outward[at].sum())
                sums.upward += float(upward[at].sum())
                sums.outward_squares += float(outward[at].square().sum())
                sums.upward_squares += float(upward[at].square().sum())

    def _sums(self, group: Group, rank: int) -> Sums:
        self.rank_of.setdefault(group, rank)
        return self.sums.setdefault(group, Sums())

    def _first_seen(self, rows: Rows, steps: Steps) -> tuple[Tensor, Tensor]:
        """Two [N] bool: rows with steps that are new on their rank, and new on any rank."""
        new_on_rank, new = (torch.zeros(len(rows), dtype=torch.bool) for _ in range(2))
        row, first = _first_of_each(steps.row)
        keys = steps.row_keys[first].tolist()
        for at, rank, key in zip(row.tolist(), rows.rank[row].tolist(), keys, strict=True):
            for flags, where in ((new_on_rank, rank), (new, -1)):
                flags[at] = (where, key) not in self._seen
                self._seen.add((where, key))
        return new_on_rank, new


def _blocks(columns: int) -> int:
    return -(-columns // BLOCK)


def _members(kind: Kind, index: Tensor) -> Iterator[tuple[Group, Tensor]]:
    """Each group of ``index`` [N] with the places of its members; negative ones have none."""
    order, found, counts = _by_group(index)
    for number, at in zip(found.tolist(), torch.split(order, counts.tolist()), strict=True):
        yield Group(kind, number), at


def _by_group(index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Places in ``index`` [N] group after group, [G] which groups, and [G] members of each."""
    order = index.argsort(stable=True)[int((index < 0).sum()) :]
    return order, *torch.unique_consecutive(index[order], return_counts=True)


def _first_of_each(row: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct values of [F] ascending numbers, and the first place of each."""
    found, counts = torch.unique_consecutive(row, return_counts=True)
    return found, counts.cumsum(0) - counts
