"""What ``list`` prints, as titled tables of name, about and whether it runs."""

from collections.abc import Sequence

from moe.faults import CLASSES, FAULTS, VOID_WHERE, Fault, FaultClass
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
"""A title, and rows of (name, about, runs), or of (name, about, void where)."""


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
        ("sweeps", [(str(e.path), e.about, e.rows) for e in sweeps]),
    ]
    for title, entries in (
        ("presets", preset_entries()),
        ("dispatchers", dispatcher_entries()),
        ("recipes", recipe_entries()),
    ):
        tables.append((title, [(e.name, e.about, _runs(e.runs)) for e in entries]))
    return [(title, rows) for title, rows in tables if rows]


def fault_tables() -> list[NamedTable]:
    """What can be injected, class by class: with parameters, stage, origin and where it is void."""
    return [(kind, [_fault_row(fault) for fault in faults_of(kind)]) for kind in FaultClass]


def faults_of(kind: FaultClass) -> list[Fault]:
    """The faults of a class, in the order of the pipeline."""
    return [fault for name, fault in FAULTS.items() if CLASSES[name] is kind]


def _fault_row(fault: Fault) -> tuple[str, str, str]:
    params = ", ".join(f"{name}={value}" for name, value in fault.params.items())
    name = f"{fault.name}: {params}" if params else fault.name  # wrapped between parameters
    return name, f"{fault.stage}: {fault.about} ({fault.origin})", VOID_WHERE[fault.name]


def _runs(runs: bool) -> str:
    return "yes" if runs else "not in this version"
