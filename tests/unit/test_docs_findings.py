"""The page of findings has every scenario with its stage and what its run prints."""

from pathlib import Path

import yaml

from tests.unit.pages import ROOT, blocks, table_rows

PAGE = ROOT / "docs" / "findings.md"
SCENARIOS = sorted((ROOT / "scenarios" / "findings").glob("*.yaml"))
IN_LIBRARIES, NO_FINDING = "## In libraries that a GPU runs", "## Read, and no finding"


def expected_stage(path: Path) -> str:
    return yaml.safe_load(path.read_text())["expect"]["stage"]


def test_every_finding_has_a_row_with_the_stage_where_it_is_expected():
    rows = table_rows(PAGE.read_text().partition(IN_LIBRARIES)[0])[1:]
    assert {row[0]: row[2] for row in rows} == {
        path.stem: expected_stage(path) for path in SCENARIOS
    }


def test_a_finding_is_called_measured_only_if_its_file_says_so():
    rows = table_rows(PAGE.read_text().partition(IN_LIBRARIES)[0])[1:]
    known_by = {row[0]: row[1] for row in rows}
    for path in SCENARIOS:
        head = path.read_text().partition("\n")[0]
        word = "measured" if head.startswith("# Measured with the released") else "read"
        assert known_by[path.stem] == word
        assert word == "measured" or head.startswith("# By reading of the ")


def test_every_finding_in_a_library_has_a_row_with_the_stage_where_it_is_expected():
    text = PAGE.read_text().partition(IN_LIBRARIES)[2].partition(NO_FINDING)[0]
    expecting = [
        path
        for path in (ROOT / "scenarios" / "gpu").glob("*.yaml")
        if "expect" in yaml.safe_load(path.read_text())
    ]
    assert {row[0]: row[2] for row in table_rows(text)[1:]} == {
        path.stem: expected_stage(path) for path in expecting
    }


def test_the_output_of_every_finding_is_shown():
    (shown,) = (block.text for block in blocks(PAGE) if block.language == "text")
    lines = dict(line.split(": discrepancy: stage ", 1) for line in shown.splitlines())
    stages = {name: said.partition(",")[0] for name, said in lines.items()}
    assert stages == {path.stem: expected_stage(path) for path in SCENARIOS}
