"""The page of faults, and the tables behind it: every fault has a class and a place to be void."""

from pathlib import Path

import pytest

from moe.faults import CLASSES, FAULTS, NO_FAULT_OF, VOID_WHERE, FaultClass
from scenarios.fault_page import page
from scenarios.listing import fault_tables

PAGE = Path(__file__).parents[3] / "docs" / "faults.md"


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == page(), "renew it: python -m scenarios.fault_page > docs/faults.md"


@pytest.mark.parametrize("table", [CLASSES, VOID_WHERE], ids=["classes", "void where"])
def test_every_fault_has_a_row(table):
    assert table.keys() == FAULTS.keys()


def test_a_class_has_a_fault_or_says_why_not():
    assert NO_FAULT_OF.keys() == set(FaultClass) - set(CLASSES.values())


def test_the_tables_of_list_hold_each_fault_once():
    names = [name.partition(":")[0] for _, rows in fault_tables() for name, _, _ in rows]
    assert sorted(names) == sorted(FAULTS)


def test_a_row_links_the_public_bug_and_says_where_the_fault_is_void():
    (row,) = [line for line in PAGE.read_text().splitlines() if "`topk_weights_twice`" in line]
    assert "https://github.com/vllm-project/vllm/issues/45037" in row
    assert VOID_WHERE["topk_weights_twice"] in row
