"""The page on diagnoses lists every hypothesis and every kind of mistake, and its true figures."""

import re

from moe.faults import FAULTS
from moe.faults.mistaken import MISTAKES
from moe.mistakes import Mistake
from reports.verdict.diagnosis import Certainty
from reports.verdict.diagnosis.hypotheses import HYPOTHESES
from tests.unit.pages import ROOT, section, table_rows

PAGE = (ROOT / "docs" / "diagnosis.md").read_text()


def test_the_page_has_a_row_for_every_hypothesis():
    rows = table_rows(section("diagnosis.md", "## The hypotheses"))
    assert [row[0] for row in rows if row[0] != "hypothesis"] == list(HYPOTHESES)


def test_the_page_names_every_kind_of_mistake():
    words = set(re.findall(r"`(\w+)`", section("diagnosis.md", "## The hypotheses")))
    assert set(Mistake) <= words


def test_the_page_explains_every_confidence():
    rows = table_rows(PAGE.partition("## The hypotheses")[0])
    assert [row[0] for row in rows if row[0] != "confidence"] == ["high", "low", "none"]
    assert {str(one) for one in Certainty} == {"high", "low", "none"}


def test_faults_say_which_kinds_of_mistake_name_them():
    assert {name: fault.mistakes for name, fault in FAULTS.items() if fault.mistakes} == MISTAKES
