"""Every named fault is found at its stage and rank, or is proven to have changed nothing."""

import pytest
import torch

from actors.planning import plan_of
from actors.resolve import arm_faults
from moe.faults import FAULTS, FaultKind
from moe.formats import Stage
from tests.mutation import cases
from tests.mutation.cases import Case
from tests.mutation.determinism_cases import LOSES_BITS
from tests.mutation.expert_cases import EXPERTS_FOUND, EXPERTS_VOID
from tests.mutation.scale_cases import SCALES_FOUND, SCALES_VOID
from tests.mutation.slip_cases import SLIPS_FAILED, SLIPS_FOUND, SLIPS_VOID
from tests.mutation.worlds import judged, load

FOUND = (*cases.FOUND, *EXPERTS_FOUND, *SCALES_FOUND, *SLIPS_FOUND)
FAILED = (*cases.FAILED, *SLIPS_FAILED)
VOID = (*cases.VOID, *EXPERTS_VOID, *SCALES_VOID, *SLIPS_VOID)
OF_THE_JUDGE = {name for name, fault in FAULTS.items() if fault.kind.is_of_the_judge}
NO_FAULTS_OF_A_LAYER = {"rank_raises", "rank_dies", "rank_hangs", *OF_THE_JUDGE}


def run(case: Case):
    return judged(case.world, case.fault, sets=case.sets)


def clean(case: Case):
    return judged(case.world, sets=case.sets)


def armed_of(case: Case):
    (armed,) = arm_faults(load(case.world, case.fault, sets=case.sets))
    return armed


def every(cases):
    return pytest.mark.parametrize("case", cases, ids=str)


def test_every_fault_of_a_layer_has_a_world_that_shows_it():
    shown = {
        case.fault.partition(":")[0] for case in (*FOUND, *LOSES_BITS, *FAILED, *cases.UNREADABLE)
    }
    assert shown == FAULTS.keys() - NO_FAULTS_OF_A_LAYER


@every(FOUND)
def test_a_fault_is_found_first_at_its_stage_and_rank(case):
    result = run(case).result
    first = result.first_divergence
    assert (result.verdict, result.as_expected) == ("discrepancy", False)
    assert (first.stage, first.rank) == (case.stage, case.rank)


@every((*FOUND, *FAILED, *cases.UNREADABLE))
def test_a_fault_says_at_which_stage_it_acts_under_a_topology(case):
    plan = plan_of(load(case.world, sets=case.sets))
    assert armed_of(case).stage_in(plan) is case.stage


@every(FOUND)
def test_a_fault_is_blamed_on_no_rank_but_its_own(case):
    blamed = {finding.rank for finding in run(case).result.findings}
    assert blamed <= set(armed_of(case).ranks)


@every([case for case in FOUND if "run.rounds=3" in case.sets])
def test_what_is_left_over_is_found_in_the_second_forward_and_not_in_the_first(case):
    assert run(case).result.first_divergence.round == 2


@every(FOUND)
def test_a_fault_that_is_found_is_not_said_to_be_idle(case):
    assert "nothing to act on" not in run(case).result.summary


@every([case for case in FOUND if not case.moves])
def test_a_fault_that_is_found_has_changed_the_output(case):
    assert not torch.equal(run(case).output, clean(case).output)


@every([case for case in FOUND if case.moves])
def test_a_fault_of_bookkeeping_is_found_without_a_change_of_the_output(case):
    assert torch.equal(run(case).output, clean(case).output)
    of_padding = {("band", None)}  # weights of rows that are no token
    found = {(finding.check, finding.token) for finding in run(case).result.findings} - of_padding
    checks = {check for check, _ in found}
    assert checks <= {"accounts", "contract", "contract: moves", "quantiser rule"}


@every(FAILED)
def test_a_fault_that_ends_the_run_is_named_with_stage_and_rank(case):
    result = run(case).result
    assert result.verdict == "failed"
    assert f"stage {case.stage}" in result.summary
    assert f"rank {case.rank}" in result.summary or f"ranks [{case.rank}]" in result.summary


@every(cases.UNREADABLE)
def test_a_tensor_of_another_shape_is_a_discrepancy_of_its_stage_and_rank(case):
    result = run(case).result
    first = result.first_divergence
    assert (result.verdict, first.stage, first.rank) == ("discrepancy", case.stage, case.rank)
    assert first.tensor in result.summary


@every(VOID)
def test_a_void_fault_changes_no_bit_of_the_output(case):
    assert run(case).result.verdict == "agree"
    assert torch.equal(run(case).output, clean(case).output)


@every(VOID)
def test_a_void_fault_is_said_to_have_found_nothing_to_act_on(case):
    name = case.fault.partition(":")[0]
    assert f"fault {name} found nothing to act on" in run(case).result.summary


IN_EVERY_RECIPE = [
    name
    for name, fault in FAULTS.items()
    if name in {case.fault for case in FOUND if case.world == "a2a" and not case.sets}
    and fault.kind is FaultKind.VALUE
]


NEEDS_SCALES = "scale_rounded_down"


@pytest.mark.parametrize(
    ("world", "name"),
    [
        (world, name)
        for world in ("a2a fp32 scales", "a2a bf16")
        for name in IN_EVERY_RECIPE
        if (world, name) != ("a2a bf16", NEEDS_SCALES)
    ],
)
def test_a_fault_is_found_whatever_the_recipe(world, name):
    first = judged(world, name).result.first_divergence
    assert (first.stage, first.rank) == (FAULTS[name].stage, 2)


BLINDABLE = {
    "topk_weights_twice": "band",
    "partial_dropped": "band",
    "scaling_factor_twice": "band",
    "scale_rounded_down": "quantiser rule",
    "tokens_swapped": "contract: moves",
    "gate_up_swapped": "contract: prepared weights",
    "count_off_by_one": "contract",
}


@pytest.mark.parametrize(("name", "check"), BLINDABLE.items())
def test_a_fault_is_invisible_once_its_check_is_blinded(name, check):
    result = judged("a2a", name, f"checker_blinded:check='{check}'").result
    assert result.first_divergence is None
    assert result.findings == ()


@pytest.mark.parametrize(("name", "check"), BLINDABLE.items())
def test_a_fault_is_visible_while_another_check_is_blinded(name, check):
    result = judged("a2a", name, "checker_blinded:check='router rule'").result
    assert result.first_divergence.check == check


def test_a_blinded_check_cannot_be_read_as_agreement():
    result = judged("a2a", "checker_blinded:check=band").result
    (band,) = [check for check in result.checks if check.name == "band"]
    assert (band.verdict, band.detail) == ("failed", "blinded by an injected fault")
    assert result.verdict == "failed"
    assert "could not judge band" in result.summary


@pytest.mark.parametrize("stage", list(Stage))
def test_a_rank_that_raises_fails_the_run_with_rank_and_stage(stage):
    result = judged("a2a", f"rank_raises:rank=2,stage={stage}").result
    assert result.verdict == "failed"
    assert f"rank 2 raised in stage {stage} " in result.summary
    ended = {info.rank: (info.verdict, info.stage) for info in result.ranks}
    assert ended[2] == ("raised", stage)
    assert {ended[rank][0] for rank in (0, 1, 3)} == {"released"}


def test_a_rank_that_skips_the_combine_is_the_only_one_that_hung():
    result = judged("a2a", "combine_skipped:rank=2").result
    assert "deadlock in stage combine: rank 2 left without taking part" in result.summary
    assert {info.rank for info in result.ranks if info.verdict == "hung"} == {2}


def test_two_faults_are_both_found():
    result = judged("a2a", "tokens_swapped:rank=2", "topk_weights_twice:rank=0").result
    found = {(finding.stage, finding.rank) for finding in result.findings}
    assert found == {(Stage.DISPATCH, 2), (Stage.POST_PERMUTE, 0)}
