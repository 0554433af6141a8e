"""The mutation score's command, on a slice of its pairs: each fate, and what it is told by."""

import pytest

from actors.driver import run_scenario
from actors.kept import KeptWork, traces_differ
from actors.score import check_scorable, score_fault, score_scenario
from moe.formats import Stage
from reports.score import Fate
from reports.verdict.ledger import Ledger
from scenarios.errors import InputError
from scenarios.inject import parse_inject
from tests.mutation.worlds import load, outcome

LOCALISED = {
    "gate_up_swapped": (Stage.WEIGHTS, 2),
    "tokens_swapped": (Stage.DISPATCH, 2),
    "scale_rounded_down": (Stage.ACTIVATION, 2),
    "partial_dropped": (Stage.COMBINE, 2),
    "combine_skipped": (Stage.COMBINE, 2),
    "shared_expert_missing": (Stage.TAIL, 2),
}
VOID = ("placement_ignored", "ties_to_highest_id", "stale_row")


@pytest.fixture(scope="module")
def pairs():
    faults = (*LOCALISED, *VOID, "rank_dies", "checker_blinded")
    return score_scenario(load("a2a"), faults).pairs


@pytest.mark.parametrize("fault", LOCALISED)
def test_a_fault_is_localised_where_it_acts(pairs, fault):
    pair = pairs[fault]
    assert pair.fate in {Fate.LOCALISED, Fate.NAMED}
    assert (pair.stage, pair.rank) == LOCALISED[fault]


@pytest.mark.parametrize("fault", VOID)
def test_a_fault_that_changes_nothing_is_void(pairs, fault):
    assert pairs[fault].fate is Fate.VOID


def test_a_fault_that_ends_its_process_is_unsupported(pairs):
    assert pairs["rank_dies"].fate is Fate.UNSUPPORTED


def test_a_blinded_check_is_no_agreement(pairs):
    assert pairs["checker_blinded"].fate is Fate.KILLED


def reports(one):
    return [run.reports for run in one.runs]


def test_traces_differ_where_a_fault_has_changed_something_and_nowhere_else():
    clean = reports(run_scenario(load("a2a"), kept=KeptWork()))
    assert traces_differ(clean, reports(outcome("a2a", "shared_expert_missing")))
    assert not traces_differ(clean, reports(outcome("a2a")))


def test_a_run_that_is_the_clean_one_bit_for_bit_is_not_judged_again():
    kept = KeptWork()
    clean = kept.clean = run_scenario(load("a2a"), kept=kept)
    assert run_scenario(load("a2a", "placement_ignored"), kept=kept) is clean
    assert run_scenario(load("a2a", "tokens_swapped"), kept=kept) is not clean
    assert run_scenario(load("a2a", "checker_blinded"), kept=kept) is not clean


def test_a_fault_that_no_check_sees_survives(monkeypatch):
    loaded, kept = load("a2a"), KeptWork()
    clean = run_scenario(loaded, kept=kept)
    monkeypatch.setattr(Ledger, "_enter", lambda *args: None)
    pair = score_fault(loaded, clean, kept, parse_inject("shared_expert_missing"))
    assert pair.fate is Fate.SURVIVED


@pytest.mark.parametrize("fault", ["gate_up_swapped", "tokens_swapped", "scaling_factor_twice"])
def test_kept_work_changes_no_finding(fault):
    loaded, kept = load("a2a"), KeptWork()
    run_scenario(loaded, kept=kept)
    again = run_scenario(load("a2a", fault), kept=kept).result
    assert again.findings == outcome("a2a", fault).result.findings
    assert again.stages == outcome("a2a", fault).result.stages


def test_a_scenario_that_injects_faults_itself_is_refused():
    with pytest.raises(InputError, match="injects tokens_swapped; a score brings its own"):
        check_scorable(load("a2a", "tokens_swapped"))


def test_of_a_scenario_whose_clean_run_does_not_agree_no_fault_is_tried():
    scored = score_scenario(load("a2a", "tokens_swapped"), ["tokens_swapped"])
    assert scored.pairs == {}
    assert scored.clean.startswith("discrepancy")
