"""A sweep to its rows: the product of its axes, each checked as a scenario file is."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Final

from scenarios.covering import Covering, cover
from scenarios.errors import Problem, ScenarioError, not_one_of, shown
from scenarios.loader import LoadedScenario, load_scenario
from scenarios.rules import BrokenRule
from scenarios.sweep_file import holds_sweep, read_sweep
from scenarios.sweep_rows import Row, SweepRows
from scenarios.sweep_schema import STRENGTHS, Axis, AxisValue, Strategy, Sweep, value_of_key
from scenarios.yaml_text import read_file, read_value

MOST_ROWS: Final = 100_000


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
    coverage  what the legal rows cover, where not all run; then ``refused`` and ``excluded`` are
              empty: what is impossible is counted here
    """

    sweep: Sweep
    legal: tuple[tuple[Row, LoadedScenario], ...]
    refused: tuple[tuple[Row, tuple[BrokenRule, ...]], ...]
    excluded: tuple[tuple[Row, str], ...]
    coverage: Covering | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the product, a row once for every seed."""
        return num_rows(self.sweep)

    def refusals(self) -> list[Refusal]:
        """Rules that refuse rows, the busiest first; a row counts for each rule that it breaks."""
        found: dict[str, Refusal] = {}
        for row, rules in self.refused:
            for rule in rules:
                before = found.get(rule.name, Refusal(rule=rule, num_rows=0, first=row.name))
                found[rule.name] = replace(before, num_rows=before.num_rows + 1)
        return sorted(found.values(), key=lambda refusal: -refusal.num_rows)

    def values_without_a_row(self) -> list[tuple[str, str]]:
        """(axis, name) of values that no legal row has although rows with them were asked for."""
        used = {pair for row, _ in self.legal for pair in row.values.items()}
        asked = dict.fromkeys(pair for row, _ in self.refused for pair in row.values.items())
        if self.coverage is not None:
            axes = self.sweep.axes
            asked = dict.fromkeys((axis.name, value.name) for axis in axes for value in axis.values)
        return [pair for pair in asked if pair not in used]


def load_path(
    path: Path,
    *,
    overrides: Sequence[str] = (),
    injects: Sequence[str] = (),
    known_faults: Collection[str] | None = None,
    most_rows: int | None = MOST_ROWS,
) -> LoadedScenario | ExpandedSweep:
    """Whatever a file holds, a scenario or a sweep; arguments and errors as of each."""
    if holds_sweep(path):
        sweep = read_sweep(read_file(path), path)
        return expand(
            sweep,
            overrides=overrides,
            injects=injects,
            known_faults=known_faults,
            most_rows=most_rows,
        )
    return load_scenario(path, overrides=overrides, injects=injects, known_faults=known_faults)


def expand(
    sweep: Sweep,
    *,
    overrides: Sequence[str] = (),
    injects: Sequence[str] = (),
    known_faults: Collection[str] | None = None,
    most_rows: int | None = MOST_ROWS,
) -> ExpandedSweep:
    """Choose rows, and check them by the loader and the rules of scenario files.

    Args:
        sweep: as read.
        overrides: ``KEY=VALUE`` as of ``--set``: of an axis, its one value; of another key, what
            every row has.
        injects: faults as of ``--inject``, added to every row.
        known_faults: names that exist; None leaves fault names unchecked.
        most_rows: of a product that is checked row by row; None is as many as there are.

    Raises:
        ScenarioError: anything that is wrong apart from rules, in any row that was looked at; or no
            row is legal.
    """
    sweep, others = _narrowed(sweep, overrides)
    rows = SweepRows(sweep, others, injects, known_faults)
    if sweep.strategy is Strategy.ALL:
        expanded = _multiplied_out(sweep, rows, most_rows)
    else:
        expanded = _covered(sweep, rows)
    if rows.problems:
        raise ScenarioError(str(sweep.path), list(rows.problems))
    if not expanded.legal:
        raise ScenarioError(str(sweep.path), _why_nothing_is_left(expanded))
    return expanded


def num_rows(sweep: Sweep) -> int:
    """Rows of the product of all axes."""
    return prod(len(axis.values) for axis in sweep.all_axes)


def _multiplied_out(sweep: Sweep, rows: SweepRows, most_rows: int | None) -> ExpandedSweep:
    if most_rows is not None and num_rows(sweep) > most_rows:
        told = f"{num_rows(sweep)} rows; more than {most_rows} take --yes, or `strategy: pairs`"
        raise ScenarioError(str(sweep.path), [Problem("axes", told)])
    legal, refused, excluded = [], [], []
    for chosen in product(*(axis.values for axis in sweep.all_axes)):
        row = rows.row(chosen)
        if because := rows.excluded_because(row):
            excluded.append((row, because))
            continue
        checked = rows.check(row.name, chosen)
        if checked.loaded:
            legal.append((row, checked.loaded))
        else:
            refused.append((row, checked.refusals))
    return ExpandedSweep(
        sweep=sweep, legal=tuple(legal), refused=tuple(refused), excluded=tuple(excluded)
    )


def _covered(sweep: Sweep, rows: SweepRows) -> ExpandedSweep:
    strength = min(STRENGTHS[sweep.strategy], len(sweep.axes))
    sizes = [len(axis.values) for axis in sweep.axes]
    coverage = cover(sizes, strength, str(sweep.salt), rows.conflicts, rows.exclusions())
    legal = []
    seeds = [()] if sweep.seeds is None else [(seed,) for seed in sweep.seeds.values]
    for numbers, seed in product(coverage.rows, seeds):
        chosen = (*rows.values(numbers), *seed)
        row = rows.row(chosen)
        checked = rows.check(row.name, chosen)
        if checked.loaded:
            legal.append((row, checked.loaded))
    return ExpandedSweep(
        sweep=sweep, legal=tuple(legal), refused=(), excluded=(), coverage=coverage
    )


def _narrowed(sweep: Sweep, overrides: Sequence[str]) -> tuple[Sweep, list[str]]:
    """The sweep with one value on each axis that an override names, and the other overrides."""
    axes = {axis.name: axis for axis in sweep.all_axes}
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
    kept = tuple(axes[axis.name] for axis in sweep.axes)
    seeds = None if sweep.seeds is None else axes[sweep.seeds.name]
    return replace(sweep, axes=kept, seeds=seeds), others


def _asked_value(axis: Axis, text: str) -> AxisValue | str:
    """The value of an axis that ``--set`` asks for, or what is wrong with it."""
    if not axis.is_key:
        known = {value.name: value for value in axis.values}
        return known.get(text.strip()) or not_one_of(text.strip(), known)
    read = read_value(text)
    read.origins = {(): "--set"}
    value = None if read.problems else value_of_key(axis.name, read)
    return value or f"{shown(text)} makes no name of a row"


def _why_nothing_is_left(expanded: ExpandedSweep) -> list[Problem]:
    if expanded.coverage is not None:
        rules = sorted({rule for rules in expanded.coverage.impossible for rule in rules})
        return [Problem("axes", f"no row is legal: {', '.join(rules)}")]
    if not expanded.refused:
        return [Problem("exclude", "leaves no row")]
    return [
        Problem(
            refusal.rule.field,
            f"no row is legal; {refusal.num_rows} of {expanded.num_rows}: {refusal.rule.refusal}",
        )
        for refusal in expanded.refusals()
    ]
