"""The mutation score's command, on a slice of its pairs: each fate, and what it is told by."""

from dataclasses import replace

import pytest
import torch

from actors.driver import run_scenario
from actors.kept import KeptWork, forwards_differ
from actors.score import check_scorable, score_fault, score_scenario
from moe.formats import Stage
from reports.score import KILLS, Fate
from reports.verdict.judge import Judge
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
    assert pairs[fault].reason.startswith("found nothing to act on; it is void where: ")


def test_a_fault_that_ends_its_process_is_unsupported(pairs):
    assert pairs["rank_dies"].fate is Fate.UNSUPPORTED
    assert "rank_dies" in pairs["rank_dies"].reason


def test_a_blinded_check_is_no_agreement(pairs):
    assert pairs["checker_blinded"].fate is Fate.KILLED


def test_forwards_differ_where_a_fault_has_changed_something_and_nowhere_else():
    clean, again, wrong = (
        run_scenario(load("a2a", *faults), kept=KeptWork()).forwards
        for faults in ((), ("placement_ignored",), ("shared_expert_missing",))
    )
    assert forwards_differ(clean, wrong)
    assert not forwards_differ(clean, again)


def test_forwards_differ_where_nothing_but_a_layout_has_changed():
    clean = run_scenario(load("a2a"), kept=KeptWork()).forwards
    first, *others = clean[0]
    named = dict(first.trace[Stage.ACTIVATION])
    scale = named["hidden_states_scale"]
    named["hidden_states_scale"] = scale.clone(memory_format=torch.contiguous_format)
    assert scale.stride() != named["hidden_states_scale"].stride()
    trace = replace(first.trace, stages={**first.trace.stages, Stage.ACTIVATION: named})
    other = [[replace(first, trace=trace), *others], *clean[1:]]
    assert forwards_differ(clean, other)


LATER = ("sum_order_varies", "tile_depends_on_batch:rows=4")


@pytest.mark.parametrize("fault", LATER)
def test_a_fault_that_acts_in_forwards_that_are_not_judged_is_killed(fault):
    loaded, kept = load("a2a"), KeptWork()
    clean = run_scenario(loaded, kept=kept)
    assert score_fault(loaded, clean, kept, parse_inject(fault)).fate in KILLS


def test_a_fault_that_acts_in_an_unjudged_forward_and_is_not_seen_survives(monkeypatch):
    loaded, kept = load("a2a"), KeptWork()
    clean = run_scenario(loaded, kept=kept)
    monkeypatch.setattr(Ledger, "_enter", lambda *args: None)
    pair = score_fault(loaded, clean, kept, parse_inject("sum_order_varies"))
    assert pair.fate is Fate.SURVIVED
    summary = run_scenario(load("a2a", "sum_order_varies")).result.summary
    assert "nothing to act on" not in summary


def test_judged_forwards_that_are_the_clean_ones_bit_for_bit_are_not_judged_again(monkeypatch):
    kept = KeptWork()
    run_scenario(load("a2a"), kept=kept)
    judged = []
    monkeypatch.setattr(Judge, "judge", lambda self, *args: judged.append(args))
    again = run_scenario(load("a2a", "placement_ignored"), kept=kept).result
    assert (again.verdict, judged) == ("agree", [])


def test_a_faulty_run_that_comes_first_leaves_nothing_behind():
    kept = KeptWork()
    run_scenario(load("a2a", "gate_up_swapped", "checker_blinded"), kept=kept)
    assert run_scenario(load("a2a"), kept=kept).result.verdict == "agree"
    again = run_scenario(load("a2a", "checker_blinded"), kept=kept).result
    assert again.verdict == "failed"


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
