"""A sweep to its rows: the product of its axes, each checked as a scenario file is."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Final

from scenarios.command_line import add_injects, apply_sets
from scenarios.document import Document
from scenarios.errors import KeyPath, Problem, ScenarioError, dotted, not_one_of, shown
from scenarios.loader import LoadedScenario, check_document, load_scenario
from scenarios.rules import BrokenRule
from scenarios.sweep_file import holds_sweep, read_sweep
from scenarios.sweep_schema import Axis, AxisValue, Sweep, value_of_key
from scenarios.yaml_text import read_file, read_value

MOST_ROWS: Final = 100_000


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A rule with the number of rows that break it, and the first of them."""

    rule: BrokenRule
    num_rows: int
    first: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedSweep:
    """A sweep with every row of its product, each kind in the product's order.

    legal     rows that can run, each a scenario of the row's name
    refused   rows with the rules that refuse them
    excluded  rows that the sweep leaves out, with its reason
    """

    sweep: Sweep
    legal: tuple[tuple[Row, LoadedScenario], ...]
    refused: tuple[tuple[Row, tuple[BrokenRule, ...]], ...]
    excluded: tuple[tuple[Row, str], ...]

    @property
    def num_rows(self) -> int:
        """Rows of the product."""
        return len(self.legal) + len(self.refused) + len(self.excluded)

    def refusals(self) -> list[Refusal]:
        """Rules that refuse rows, the busiest first; a row counts for each rule that it breaks."""
        found: dict[str, Refusal] = {}
        for row, rules in self.refused:
            for rule in rules:
                before = found.get(rule.name, Refusal(rule=rule, num_rows=0, first=row.name))
                found[rule.name] = replace(before, num_rows=before.num_rows + 1)
        return sorted(found.values(), key=lambda refusal: -refusal.num_rows)

    def values_without_a_row(self) -> list[tuple[str, str]]:
        """(axis, name) of values that rules refuse in every row."""
        used = {pair for row, _ in self.legal for pair in row.values.items()}
        refused = dict.fromkeys(pair for row, _ in self.refused for pair in row.values.items())
        return [pair for pair in refused if pair not in used]


def load_path(
    path: Path,
    *,
    overrides: Sequence[str] = (),
    injects: Sequence[str] = (),
    known_faults: Collection[str] | None = None,
) -> LoadedScenario | ExpandedSweep:
    """Whatever a file holds, a scenario or a sweep; arguments and errors as of each."""
    if holds_sweep(path):
        sweep = read_sweep(read_file(path), path)
        return expand(sweep, overrides=overrides, injects=injects, known_faults=known_faults)
    return load_scenario(path, overrides=overrides, injects=injects, known_faults=known_faults)


def expand(
    sweep: Sweep,
    *,
    overrides: Sequence[str] = (),
    injects: Sequence[str] = (),
    known_faults: Collection[str] | None = None,
) -> ExpandedSweep:
    """Check every row by the loader and the rules of scenario files.

    Args:
        sweep: as read.
        overrides: ``KEY=VALUE`` as of ``--set``: of an axis, its one value; of another key, what
            every row has.
        injects: faults as of ``--inject``, added to every row.
        known_faults: names that exist; None leaves fault names unchecked.

    Raises:
        ScenarioError: anything that is wrong apart from rules, in any row; or no row is legal.
    """
    sweep, others = _narrowed(sweep, overrides)
    legal, refused, excluded = [], [], []
    problems: dict[Problem, None] = {}
    for row, chosen in _product(sweep):
        if because := _excluded_because(sweep, row):
            excluded.append((row, because))
            continue
        document = _document(sweep, row, chosen, others, injects)
        checked = check_document(document, sweep.path, known_faults=known_faults)
        problems.update(dict.fromkeys(checked.problems))
        if checked.loaded:
            legal.append((row, checked.loaded))
        else:
            refused.append((row, checked.refusals))
    if problems:
        raise ScenarioError(str(sweep.path), list(problems))
    expanded = ExpandedSweep(
        sweep=sweep, legal=tuple(legal), refused=tuple(refused), excluded=tuple(excluded)
    )
    if not legal:
        raise ScenarioError(str(sweep.path), _why_nothing_is_left(expanded))
    return expanded


def _narrowed(sweep: Sweep, overrides: Sequence[str]) -> tuple[Sweep, list[str]]:
    """The sweep with one value on each axis that an override names, and the other overrides."""
    axes = {axis.name: axis for axis in sweep.axes}
    problems: list[Problem] = []
    others = []
    for override in overrides:
        key, _, text = override.partition("=")
        axis = axes.get(key.strip())
        if axis is None:
            others.append(override)
        elif isinstance(value := _asked_value(axis, text), AxisValue):
            axes[axis.name] = replace(axis, values=(value,))
        else:
            problems.append(Problem(axis.name, value, "--set"))
    if problems:
        raise ScenarioError(str(sweep.path), problems)
    return replace(sweep, axes=tuple(axes.values())), others


def _asked_value(axis: Axis, text: str) -> AxisValue | str:
    """The value of an axis that ``--set`` asks for, or what is wrong with it."""
    if not axis.is_key:
        known = {value.name: value for value in axis.values}
        return known.get(text.strip()) or not_one_of(text.strip(), known)
    read = read_value(text)
    read.origins = {(): "--set"}
    value = None if read.problems else value_of_key(axis.name, read)
    return value or f"{shown(text)} makes no name of a row"


def _product(sweep: Sweep) -> Iterator[tuple[Row, tuple[AxisValue, ...]]]:
    num_rows = prod(len(axis.values) for axis in sweep.axes)
    if num_rows > MOST_ROWS:
        problem = Problem("axes", f"{num_rows} rows; a sweep has at most {MOST_ROWS}")
        raise ScenarioError(str(sweep.path), [problem])
    for chosen in product(*(axis.values for axis in sweep.axes)):
        names = [value.name for value in chosen]
        values = dict(zip((axis.name for axis in sweep.axes), names, strict=True))
        selects = tuple(
            f"{axis.name}={value.written}" for axis, value in zip(sweep.axes, chosen, strict=True)
        )
        yield Row(name="+".join(names), values=values, selects=selects), chosen


def _excluded_because(sweep: Sweep, row: Row) -> str | None:
    reasons = (each.because for each in sweep.exclusions if each.covers(row.values))
    return next(reasons, None)


def _document(
    sweep: Sweep,
    row: Row,
    chosen: Sequence[AxisValue],
    overrides: Sequence[str],
    injects: Sequence[str],
) -> Document:
    """The row's scenario as if it stood in a file; the base, then axes, then the command line."""
    document = sweep.base.part(())
    for value in chosen:
        for key, part in value.sets.items():
            _put(document, tuple(key.split(".")), part)
    apply_sets(document, overrides)
    add_injects(document, injects)
    _put(document, ("name",), Document(value=row.name))
    return document


def _put(document: Document, path: KeyPath, part: Document) -> None:
    try:
        document.put(path, part)
    except ValueError as error:
        document.problems.append(Problem(dotted(path), str(error), part.origins.get(())))


def _why_nothing_is_left(expanded: ExpandedSweep) -> list[Problem]:
    if not expanded.refused:
        return [Problem("exclude", "leaves no row")]
    return [
        Problem(
            refusal.rule.field,
            f"no row is legal; {refusal.num_rows} of {expanded.num_rows}: {refusal.rule.refusal}",
        )
        for refusal in expanded.refusals()
    ]
