"""A score as tables and one line: what survived, and how well the rest was told."""

from collections import Counter
from collections.abc import Mapping
from typing import Final

from reports.score import KILLS, TRIED, Fate, Score

COLUMNS: Final = ("tried", "killed", "localised", "named", "void", "unsupported", "survived")
"""Of both tables, behind the name."""

_AT_LEAST: Final[Mapping[str, frozenset[Fate]]] = {
    "tried": TRIED,
    "killed": KILLS,
    "localised": frozenset({Fate.NAMED, Fate.LOCALISED}),
}


def counts_of(fates: Counter[Fate]) -> dict[str, int]:
    """Pairs by column; one that is named is localised and killed, too."""
    return {
        column: sum(fates[fate] for fate in _AT_LEAST.get(column) or {Fate(column)})
        for column in COLUMNS
    }


def fault_rows(score: Score) -> list[tuple[str, ...]]:
    """A row a fault: its name, its counts, and where it survived."""
    return [
        (name, *map(str, counts_of(fates).values()), ", ".join(score.where(name, Fate.SURVIVED)))
        for name, fates in score.by_fault().items()
    ]


def scenario_rows(score: Score) -> list[tuple[str, ...]]:
    """A row a scenario: its name, its counts, and what survived in it."""
    return [
        (
            one.name,
            *map(str, counts_of(Counter(pair.fate for pair in one.pairs.values())).values()),
            ", ".join(n for n, pair in one.pairs.items() if pair.fate is Fate.SURVIVED)
            or ("" if one.pairs else f"not scored, its clean run is no agreement: {one.clean}"),
        )
        for one in score.scenarios
    ]


def summary_line(score: Score) -> str:
    """The score in one line."""
    counts = counts_of(score.totals())
    never = [name for name, fates in score.by_fault().items() if not counts_of(fates)["tried"]]
    parts = ", ".join(f"{counts[column]} {column}" for column in COLUMNS if column != "tried")
    line = f"score: {counts['tried']} pairs tried in {len(score.scenarios)} scenarios: {parts}"
    if never:
        line += f"; acted nowhere: {', '.join(never)}"
    return f"{line}; {score.seconds:.0f} s"
