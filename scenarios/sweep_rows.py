"""The rows of a sweep one by one: what each is called, its scenario, and why it is refused."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scenarios.command_line import add_injects, apply_sets
from scenarios.covering import Conflict
from scenarios.document import Document
from scenarios.errors import KeyPath, Problem, dotted
from scenarios.loader import CheckedDocument, check_document
from scenarios.rules.reading import keys_behind
from scenarios.sweep_schema import AxisValue, Sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of the product.

    name     of its scenario: the names of its values
    values   axis -> name of its value
    selects  what ``--set`` has to say for the sweep to be this row alone
    """

    name: str
    values: Mapping[str, str]
    selects: tuple[str, ...]


class SweepRows:
    """Makes and checks rows; what is wrong with any of them apart from rules is kept."""

    def __init__(
        self,
        sweep: Sweep,
        overrides: Sequence[str],
        injects: Sequence[str],
        known_faults: Collection[str] | None,
    ) -> None:
        self._sweep, self._overrides, self._injects = sweep, overrides, injects
        self._known_faults = known_faults
        self._keys = [{key for value in axis.values for key in value.sets} for axis in sweep.axes]
        self.problems: dict[Problem, None] = {}

    def row(self, chosen: Sequence[AxisValue]) -> Row:
        """The row with these values, one an axis."""
        names = [value.name for value in chosen]
        axes = [axis.name for axis in self._sweep.all_axes]
        selects = (f"{axis}={value.written}" for axis, value in zip(axes, chosen, strict=True))
        return Row(
            name="+".join(names),
            values=dict(zip(axes, names, strict=True)),
            selects=tuple(selects),
        )

    def excluded_because(self, row: Row) -> str | None:
        """Why the sweep leaves a row out; None if it does not."""
        reasons = (each.because for each in self._sweep.exclusions if each.covers(row.values))
        return next(reasons, None)

    def check(self, name: str, chosen: Sequence[AxisValue]) -> CheckedDocument:
        """The row's scenario as if it stood in a file: the base, axes, the command line."""
        document = self._sweep.base.part(())
        for value in chosen:
            for key, part in value.sets.items():
                _put(document, tuple(key.split(".")), part)
        apply_sets(document, self._overrides)
        add_injects(document, self._injects)
        _put(document, ("name",), Document(value=name))
        checked = check_document(document, self._sweep.path, known_faults=self._known_faults)
        self.problems.update(dict.fromkeys(checked.problems))
        return checked

    def values(self, numbers: Sequence[int]) -> list[AxisValue]:
        """The values that a row has on the axes, without a seed."""
        return [axis.values[number] for axis, number in zip(self._sweep.axes, numbers, strict=True)]

    def conflicts(self, numbers: tuple[int, ...]) -> list[Conflict]:
        """Why rules refuse a row, each with the values that it is due to; empty if it is legal."""
        checked = self.check("row", self.values(numbers))
        conflicts = []
        for broken in checked.refusals:
            keys = keys_behind(broken, checked.scenario, checked.model)
            where = {axis: frozenset({numbers[axis]}) for axis in self._axes_of(keys)}
            conflicts.append(Conflict(where=where, because=broken.name))
        return conflicts

    def exclusions(self) -> Iterator[Conflict]:
        """What the sweep leaves out, as conflicts."""
        for each in self._sweep.exclusions:
            where = {}
            for at, axis in enumerate(self._sweep.axes):
                if names := each.where.get(axis.name):
                    found = (n for n, value in enumerate(axis.values) if value.name in names)
                    where[at] = frozenset(found)
            yield Conflict(where=where, because=f"excluded: {each.because}")

    def _axes_of(self, keys: Collection[str]) -> Iterator[int]:
        """Axes that set one of these keys, a section it lies in, or something in it."""
        for axis, own in enumerate(self._keys):
            if any(_overlap(key, other) for key in keys for other in own):
                yield axis


def _overlap(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _put(document: Document, path: KeyPath, part: Document) -> None:
    try:
        document.put(path, part)
    except ValueError as error:
        document.problems.append(Problem(dotted(path), str(error), part.origins.get(())))
