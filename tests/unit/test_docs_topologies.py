"""The page about topologies says of every shipped one what the planner decides for it."""

import re
from collections.abc import Iterable
from dataclasses import fields
from itertools import groupby
from pathlib import Path

import pytest

from scenarios.loader import load_scenario
from scenarios.parallel import parallel_layout, sync_of
from scenarios.schema import Scenario
from topology.sync_calls import collective_calls
from topology.sync_types import Reducer, SyncPlan

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "topologies.md").read_text()
FILES = sorted((ROOT / "scenarios" / "topologies").glob("*.yaml"))
VERB = re.compile(r"all_gather_v|reduce_scatter_v|all_reduce|all to all")
REMARKS_AT = 58
"""Column where a drawing ends and remarks begin."""

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def section(heading: str) -> str:
    """What stands below a heading, up to the next one."""
    return PAGE.split(f"\n{heading}\n")[1].split("\n#")[0]


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def table() -> tuple[list[str], dict[str, list[str]]]:
    """Heads of the table's columns, and its rows by file."""
    head, _, *rows = [line for line in section("## Plans").splitlines() if line.startswith("|")]
    return cells(head)[1:], {name.strip("`"): row for name, *row in map(cells, rows)}


def counted(numbers: Iterable[int]) -> str:
    """``5, 5, 4`` as ``2 x 5, 4``."""
    runs = [(len(list(run)), number) for number, run in groupby(numbers)]
    return ", ".join(f"{times} x {n}" if times > 1 else str(n) for times, n in runs)


def planned(path: Path) -> list[str]:
    plan = sync_of(load_scenario(path).scenario)
    return [
        *(plan.gather, plan.returning, plan.reducer, plan.padding),
        counted(plan.slots) or "-",
        counted(map(len, plan.entry)),
        counted(map(len, plan.layer)),
        "yes" if plan.masks_padding else "no",
    ]


def drawing(path: Path) -> list[str]:
    """Lines of a topology's drawing."""
    (text,) = re.findall(r"^```text\n(.*?)^```$", section(f"### `{path.stem}`"), re.M | re.S)
    return text.splitlines()


def verbs_due(scenario: Scenario) -> set[tuple[str, str]]:
    """(stage, verb) of every collective that any rank owes."""
    layout, plan = parallel_layout(scenario), sync_of(scenario)
    due = {
        (call.stage, call.op)
        for rank in layout.world
        for call in collective_calls(plan, layout, rank)
    }
    if plan.reducer is Reducer.COMBINE:
        due |= {("dispatch", "all to all"), ("combine", "all to all")}
    return due


def test_the_table_has_the_fields_of_a_plan():
    assert table()[0] == [field.name for field in fields(SyncPlan)]


def test_the_table_has_every_file_of_the_folder_once():
    lines = re.findall(r"^\| `(\w+)` \|", section("## Plans"), re.M)
    assert sorted(lines) == [path.stem for path in FILES]


@each_file
def test_the_table_has_the_plan_of(path):
    assert table()[1][path.stem] == planned(path)


@each_file
def test_the_drawing_has_the_collectives_of(path):
    drawn = {(line.split()[0], verb) for line in drawing(path) for verb in VERB.findall(line)}
    assert drawn == verbs_due(load_scenario(path).scenario)


@each_file
def test_rows_return_as_they_were_in_the_drawing_of(path):
    own = [line[:REMARKS_AT].rstrip() for line in drawing(path) if line.startswith("own")]
    assert len(own) == 2
    assert own[0] == own[1]


@pytest.mark.parametrize("section_of", re.findall(r"^### `(\w+)`$", PAGE, re.M))
def test_every_drawn_topology_is_a_file(section_of):
    assert section_of in {path.stem for path in FILES}
