"""Faults that one forward cannot show are found by comparing it with others of the same tokens."""

import pytest
import torch

from reports.verdict.determinism import BATCH, RERUN, TOPOLOGY
from tests.mutation.determinism_cases import KEEPS_BITS, LOSES_BITS
from tests.mutation.worlds import load, outcome

BY_CASE = pytest.mark.parametrize("case", LOSES_BITS, ids=str)


def run(case):
    return outcome(case.world, case.fault, sets=case.sets)


def verdicts(case):
    return {check.name: check.verdict for check in run(case).result.checks}


@BY_CASE
def test_lost_bits_are_found_first_at_the_faults_stage_and_rank(case):
    result = run(case).result
    first = result.first_divergence
    assert result.verdict == "discrepancy"
    assert (first.check, first.stage, first.rank) == (case.check, case.stage, case.rank)


@BY_CASE
def test_lost_bits_are_blamed_on_one_stage_and_rank_alone(case):
    findings = run(case).result.findings
    assert {(one.check, one.stage, one.rank) for one in findings} == {
        (case.check, case.stage, case.rank)
    }


@BY_CASE
def test_lost_bits_are_called_no_mistake(case):
    assert {one.mistake for one in run(case).result.findings} == {None}


@BY_CASE
def test_nothing_but_determinism_objects(case):
    objecting = {name for name, verdict in verdicts(case).items() if verdict == "discrepancy"}
    assert objecting == {case.check}


@BY_CASE
def test_questions_behind_a_lost_one_are_not_asked(case):
    asked = [RERUN, BATCH, TOPOLOGY]
    behind = asked[asked.index(case.check) + 1 :]
    assert {verdicts(case)[name] for name in behind} == {"not_applicable"}


@BY_CASE
def test_a_fault_whose_judged_forward_is_clean_is_not_said_to_be_idle(case):
    assert "nothing to act on" not in run(case).result.summary


def test_a_fault_that_loses_no_bit_in_any_forward_is_said_to_be_idle():
    result = run(KEEPS_BITS).result
    assert result.verdict == "agree"
    assert "fault tile_depends_on_batch found nothing to act on" in result.summary


@pytest.mark.parametrize("world", ["a2a", "slabs", "slabs ll", "v2 in place", "cp"])
def test_a_clean_layer_is_asked_all_three_questions_and_loses_nothing(world):
    found = {check.name: check.verdict for check in outcome(world).result.checks}
    assert {found[name] for name in (RERUN, BATCH, TOPOLOGY)} == {"agree"}


def test_the_judged_forward_is_the_same_with_and_without_the_others():
    """Three rounds are judged where one is: the first gives the same bits."""
    once, thrice = outcome("a2a").output, outcome("a2a", sets=("run.rounds=3",)).output
    assert torch.equal(once, thrice[: len(once)])


def test_a_backend_that_promises_nothing_is_not_blamed_for_lost_bits(monkeypatch):
    from actors import gemm
    from actors.driver import run_scenario
    from moe.arithmetic import ArithmeticModel

    class Promises(gemm.TorchGemm):
        def arithmetic(self, scale_format):
            return ArithmeticModel(summed_block=256, rows_stand_alone=False)

    monkeypatch.setattr(gemm, "_BACKENDS", {"torch": Promises})
    result = run_scenario(load("a2a", "tile_depends_on_batch:rows=4")).result
    (batch,) = [check for check in result.checks if check.name == BATCH]
    assert result.verdict == "agree"
    assert batch.verdict == "not_applicable"
    assert batch.detail.endswith("lost first in route on rank 2")


def checks(world, *sets):
    return {check.name: check for check in outcome(world, sets=sets).result.checks}


def test_exact_inputs_alone_answer_nothing_about_the_order_of_sums():
    found = checks("a2a", "inputs.modes=[exact]")
    assert {found[name].verdict for name in (RERUN, BATCH, TOPOLOGY)} == {"not_applicable"}
    assert "add random to inputs.modes" in found[RERUN].detail


def test_exact_inputs_hide_an_order_and_show_other_bits_that_are_lost():
    sets = ("inputs.modes=[exact]",)
    assert outcome("a2a", "sum_order_varies", sets=sets).result.verdict == "agree"
    lost = outcome("slabs ll", "combine_slot_stale", sets=sets).result
    assert (lost.verdict, lost.first_divergence.check) == ("discrepancy", BATCH)


def test_one_token_has_no_other_batch():
    found = checks("a2a", "batch.tokens=[0, 0, 1, 0]")
    assert found[BATCH].verdict == "not_applicable"
    assert found[BATCH].detail == "there is one token, which is alone in every batch"


@pytest.mark.parametrize(
    ("world", "where"),
    [("a2a", "on other ranks"), ("tp", "in other rows of the same ranks, which all have them")],
)
def test_a_batch_that_agrees_says_where_tokens_were(world, where):
    detail = checks(world)[BATCH].detail
    assert detail.startswith(f"tokens have the same bits among others {where}, and one alone")


def test_a_layer_that_is_wrong_is_not_asked():
    found = {check.name: check.verdict for check in outcome("a2a", "tokens_swapped").result.checks}
    assert {found[name] for name in (RERUN, BATCH, TOPOLOGY)} == {"not_applicable"}


def test_a_rank_that_leaves_too_many_rows_only_later_is_found_there():
    """Its first forward was right."""
    result = outcome("v2", "idle_dummy_row_kept", sets=("batch.tokens=[5, 2, 9, 3]",)).result
    assert (result.verdict, result.first_divergence.stage) == ("discrepancy", "combine")
