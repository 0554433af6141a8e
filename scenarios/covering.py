"""Covering arrays: few rows of a product that have every pair or triple that a legal row has.

Nothing here knows scenarios. Whether a row is legal is asked for one row at a time, and each
refusal teaches which values it is due to, so that the whole product never has to be looked at.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from covertable import make

Values = tuple[int, ...]
"""Of a row: on each axis the number of its value."""
Part = tuple[tuple[int, int], ...]
"""Some axes of a row, in order, each with the number of its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Values that refuse every row that has them all.

    where    axis -> the numbers of its values that take part
    because  the rule
    """

    where: Mapping[int, frozenset[int]]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Covering:
    """The rows chosen, and what they cover.

    rows         in the order of the product
    strength     how many axes a combination has
    num_asked    combinations of values of that many axes
    num_covered  those that a row has
    impossible   the rest, which no legal row has: rules that refuse it -> how many
    """

    rows: tuple[Values, ...]
    strength: int
    num_asked: int
    num_covered: int
    impossible: Mapping[tuple[str, ...], int]


def cover(
    sizes: Sequence[int],
    strength: int,
    salt: str,
    refusals: Callable[[Values], Sequence[Conflict]],
    known: Iterable[Conflict] = (),
) -> Covering:
    """Choose rows; the same for the same arguments.

    Args:
        sizes: number of values of each axis, 1 or more.
        strength: axes of a combination; no more than there are.
        salt: other salts choose other rows.
        refusals: why a row is refused, empty if it is legal; each conflict has the row.
        known: conflicts known beforehand; their rows are not asked about.
    """
    space = _Space(sizes, refusals, known)
    # covertable orders by FNV-1a, which mixes its last bytes too little for salts of one digit.
    digest = hashlib.sha256(salt.encode()).hexdigest()
    chosen = dict.fromkeys(space.legal_rows(strength, digest))
    covered = {part for row in chosen for part in _parts(row, strength)}
    asked = [part for part in _all_parts(sizes, strength) if part not in covered]
    impossible: Counter[tuple[str, ...]] = Counter()
    for part in asked:
        if part in covered:
            continue
        row, reasons = space.completed(part)
        if row is None:
            impossible[reasons] += 1
        else:
            chosen[row] = None
            covered.update(_parts(row, strength))
    return Covering(
        rows=tuple(sorted(chosen)),
        strength=strength,
        num_asked=sum(1 for _ in _all_parts(sizes, strength)),
        num_covered=len(covered),
        impossible=dict(impossible),
    )


class _Space:
    """A product with the conflicts found in it so far."""

    def __init__(
        self,
        sizes: Sequence[int],
        refusals: Callable[[Values], Sequence[Conflict]],
        known: Iterable[Conflict],
    ) -> None:
        self._sizes, self._refusals = sizes, refusals
        self._conflicts: dict[Values, dict[Values, str]] = {}
        self._checked: dict[Values, bool] = {}
        for conflict in known:
            self._learn(conflict)

    def legal_rows(self, strength: int, salt: str) -> list[Values]:
        """The rows of a covering array, made again until none of them is refused any more."""
        for size in range(min(2, strength), strength + 1):  # pairs teach most, in little time
            while True:
                rows = self._made(size, salt)
                refused = [row for row in rows if not self._is_legal(row)]
                if not refused:
                    break
        return rows

    def completed(self, part: Part) -> tuple[Values | None, tuple[str, ...]]:
        """The first legal row that has a part, or None with the rules that refuse them all."""
        given = dict(part)
        if direct := set(self._broken(given)):
            return None, tuple(sorted(direct))
        reasons: set[str] = set()
        row = self._search(given, [a for a in range(len(self._sizes)) if a not in given], reasons)
        return row, tuple(sorted(reasons))

    def _made(self, strength: int, salt: str) -> list[Values]:
        factors = [list(range(size)) for size in self._sizes]
        constraints = [self._constraint(axes) for axes in self._conflicts]
        rows = make(factors, strength=strength, salt=salt, constraints=constraints)
        return [tuple(row) for row in rows]

    def _constraint(self, axes: Values) -> dict[str, Any]:
        """For covertable: judged as soon as all of these axes have a value."""
        conflicts = self._conflicts[axes]
        return {
            "operator": "fn",
            "requires": list(axes),
            "evaluate": lambda row: tuple(row[axis] for axis in axes) not in conflicts,
        }

    def _is_legal(self, row: Values) -> bool:
        if row not in self._checked:
            found = [] if any(self._broken(dict(enumerate(row)))) else self._refusals(row)
            for conflict in found:
                self._learn(conflict)
            self._checked[row] = not any(self._broken(dict(enumerate(row))))
        return self._checked[row]

    def _learn(self, conflict: Conflict) -> None:
        axes = tuple(sorted(conflict.where))
        known = self._conflicts.setdefault(axes, {})
        for values in product(*(sorted(conflict.where[axis]) for axis in axes)):
            known.setdefault(values, conflict.because)

    def _broken(self, given: Mapping[int, int]) -> Iterator[str]:
        """The rules that refuse every row with these values, as far as they are known."""
        for axes, conflicts in self._conflicts.items():
            if all(axis in given for axis in axes):
                values = tuple(given[axis] for axis in axes)
                if values in conflicts:
                    yield conflicts[values]

    def _search(
        self, given: dict[int, int], missing: Sequence[int], reasons: set[str]
    ) -> Values | None:
        """Complete a row, the first axis of ``missing`` first; why none is left goes to reasons."""
        if not missing:
            whole = tuple(given[axis] for axis in range(len(self._sizes)))
            if self._is_legal(whole):
                return whole
        if broken := set(self._broken(given)):
            reasons |= broken
            return None
        for value in range(self._sizes[missing[0]]):
            row = self._search({**given, missing[0]: value}, missing[1:], reasons)
            if row is not None:
                return row
        return None


def _all_parts(sizes: Sequence[int], strength: int) -> Iterator[Part]:
    for axes in combinations(range(len(sizes)), strength):
        for values in product(*(range(sizes[axis]) for axis in axes)):
            yield tuple(zip(axes, values, strict=True))


def _parts(row: Values, strength: int) -> Iterator[Part]:
    return combinations(enumerate(row), strength)
