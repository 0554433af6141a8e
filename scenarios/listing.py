"""What ``list`` prints, as titled tables of name, about and whether it runs."""

from collections.abc import Sequence

from moe.faults import FAULTS
from scenarios.catalog import (
    dispatcher_entries,
    preset_entries,
    recipe_entries,
    scenario_entries,
    sweep_entries,
)
from scenarios.paths import expand_paths
from scenarios.sweep_file import holds_sweep

NamedTable = tuple[str, list[tuple[str, str, str]]]
"""A title, and rows of (name, about, runs)."""


def catalog_tables(paths: Sequence[str]) -> list[NamedTable]:
    """Scenarios and sweeps below these paths, presets, dispatchers and recipes.

    Raises:
        UserError: a path that does not exist, or a file that is no scenario.
    """
    files = expand_paths(paths)
    sweeps = sweep_entries([path for path in files if holds_sweep(path)])
    scenarios = scenario_entries([path for path in files if not holds_sweep(path)])
    tables = [
        ("scenarios", [(str(e.path), e.about, _runs(not e.unsupported)) for e in scenarios]),
        ("sweeps", [(str(e.path), e.about, f"{e.num_legal} of {e.num_rows} rows") for e in sweeps]),
    ]
    for title, entries in (
        ("presets", preset_entries()),
        ("dispatchers", dispatcher_entries()),
        ("recipes", recipe_entries()),
    ):
        tables.append((title, [(e.name, e.about, _runs(e.runs)) for e in entries]))
    return [(title, rows) for title, rows in tables if rows]


def fault_tables() -> list[NamedTable]:
    """What can be injected, with parameters, stage and the public bug behind it."""
    rows = []
    for fault in FAULTS.values():
        params = ", ".join(f"{name}={value}" for name, value in fault.params.items())
        rows.append(
            (f"{fault.name}:{params}", f"{fault.stage}: {fault.about} ({fault.origin})", "yes")
        )
    return [("faults", rows)]


def _runs(runs: bool) -> str:
    return "yes" if runs else "not in this version"
