"""Every fault is called by its name: its first finding names its kind of mistake."""

import pytest

from actors.driver import check_input
from moe.faults import FAULTS
from moe.faults.mistaken import MISTAKES, NOT_DIAGNOSED
from moe.mistakes import Mistake
from scenarios.errors import ScenarioError
from tests.mutation.test_faults import FOUND, every, run
from tests.mutation.worlds import load, outcome

SURE_OF_LESS_THAN_ALL = {("scales_in_wrong_layout", "scales mx")}
"""A row that no plan knows of, that of a dummy, is among those that the scales were read from."""


def fault_of(case):
    return FAULTS[case.fault.partition(":")[0]]


@every(FOUND)
def test_a_fault_is_named_by_its_kind_of_mistake(case):
    first = run(case).result.findings[0]
    assert first.mistake in fault_of(case).mistakes, first.diagnosis


@every(FOUND)
def test_the_diagnosis_of_a_single_fault_is_sure(case):
    first = run(case).result.findings[0]
    is_partial = (case.fault.partition(":")[0], case.world) in SURE_OF_LESS_THAN_ALL
    assert first.confidence == ("low" if is_partial else "high"), first.diagnosis


@every(FOUND)
def test_the_summary_names_the_diagnosis(case):
    result = run(case).result
    assert result.findings[0].diagnosis in result.summary


def test_a_fault_has_kinds_of_mistake_or_a_reason_why_not():
    assert MISTAKES.keys() | NOT_DIAGNOSED.keys() == FAULTS.keys()
    assert MISTAKES.keys() & NOT_DIAGNOSED.keys() == set()


def test_no_fault_goes_by_every_name():
    assert all(1 <= len(kinds) <= 2 for kinds in MISTAKES.values())
    assert set().union(*MISTAKES.values()) == set(Mistake)


SWAPPED = "expect={verdict: discrepancy, stage: dispatch, fault: FAULT}"


@pytest.mark.parametrize(
    ("fault", "as_expected"),
    [("tokens_swapped", True), ("row_index_wraps", True), ("stale_row", False)],
)
def test_an_expected_fault_is_met_by_a_diagnosis_of_its_kind_alone(fault, as_expected):
    sets = (SWAPPED.replace("FAULT", fault),)
    assert outcome("a2a", "tokens_swapped", sets=sets).result.as_expected is as_expected


def test_a_fault_expected_at_another_stage_is_not_met():
    sets = ("expect={verdict: discrepancy, stage: tail, fault: tokens_swapped}",)
    assert not outcome("a2a", "tokens_swapped", sets=sets).result.as_expected


def test_a_fault_that_nothing_can_diagnose_cannot_be_expected():
    sets = (SWAPPED.replace("FAULT", "rank_raises"),)
    with pytest.raises(ScenarioError, match=r"expect\.fault: no diagnosis can name rank_raises"):
        check_input(load("a2a", sets=sets))
