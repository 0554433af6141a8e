from pathlib import Path

from scenarios.docs import scenario_page
from scenarios.rules import MODEL_RULES, SCENARIO_RULES

PAGE = Path(__file__).parents[3] / "docs" / "scenarios.md"


def test_the_page_is_what_the_schema_says():
    assert PAGE.read_text() == scenario_page(), "renew it: python -m scenarios.docs"


def test_every_table_row_has_as_many_cells_as_its_head():
    tables = [block for block in scenario_page().split("\n\n") if block.startswith("| ")]
    assert len(tables) > 10
    for table in tables:
        assert len({line.count(" | ") for line in table.splitlines()}) == 1, table


def test_every_rule_is_on_the_page():
    page = scenario_page()
    assert all(f"| `{rule.name}` |" in page for rule in (*SCENARIO_RULES, *MODEL_RULES))
