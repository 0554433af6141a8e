"""Every named fault is found at its stage and rank, or is proven to have changed nothing."""

from functools import cache

import pytest
import torch

from actors.driver import run_scenario
from actors.resolve import arm_faults
from moe.faults import FAULTS, FaultKind
from moe.formats import Stage
from scenarios.loader import load_scenario

SMOKE = "scenarios/smoke/ep2_dp.yaml"
SETTINGS = (
    "run.runtime=loopback",
    "parallel.world_size=4",
    "parallel.attention.dp=4",
    "parallel.moe.ep=4",
    "batch.tokens=[5, 0, 9, 3]",
)
RECIPES = {
    "ue8m0": ("platform=sm100",),
    "fp32": ("platform=sm90",),
    "bf16": ("moe.recipe=bf16",),
}
FAILS = {"rank_raises", "combine_skipped"}
SHOWS_A_VALUE = [
    name
    for name, fault in FAULTS.items()
    if not fault.needs_process and fault.kind is not FaultKind.CHECKER and name not in FAILS
]
CASES = [(name, recipe) for name in SHOWS_A_VALUE for recipe in RECIPES]
VOID = {
    ("scale_rounded_down", "bf16"): "a recipe without scales has none to round",
    ("local_ids_left_global:rank=0", "ue8m0"): "rank 0 counts its experts as the model does",
}


@cache
def outcome(recipe, *injects):
    """What a run with these faults came to; tests share it."""
    return run_scenario(load(recipe, *injects))


def load(recipe, *injects):
    return load_scenario(SMOKE, overrides=(*SETTINGS, *RECIPES[recipe]), injects=injects)


def output_bits(one):
    (run,) = one.runs
    rows = [report.trace[Stage.GLUE_OUT]["hidden_states"] for report in run.reports]
    return torch.cat(rows).view(torch.int16)


@pytest.mark.parametrize(("name", "recipe"), [case for case in CASES if case not in VOID])
def test_a_fault_is_found_first_at_its_stage_and_rank(name, recipe):
    (armed,) = arm_faults(load(recipe, name))
    result = outcome(recipe, name).result
    first = result.first_divergence
    assert (result.verdict, result.as_expected) == ("discrepancy", False)
    assert first.stage == armed.stage
    assert first.rank in armed.ranks


@pytest.mark.parametrize("name", SHOWS_A_VALUE)
def test_a_fault_is_blamed_on_no_rank_but_its_own(name):
    result = outcome("ue8m0", f"{name}:rank=3").result
    assert {finding.rank for finding in result.findings} == {3}


@pytest.mark.parametrize(("name", "recipe"), VOID)
def test_a_void_fault_changes_no_bit_of_the_output(name, recipe):
    assert outcome(recipe, name).result.verdict == "agree"
    assert torch.equal(output_bits(outcome(recipe, name)), output_bits(outcome(recipe)))


CHANGES_NO_OUTPUT = {"count_off_by_one"}
"""Its rows only move to other places: bookkeeping shows them."""


@pytest.mark.parametrize("name", [n for n in SHOWS_A_VALUE if n not in CHANGES_NO_OUTPUT])
def test_a_fault_that_is_found_has_changed_the_output(name):
    assert not torch.equal(output_bits(outcome("ue8m0", name)), output_bits(outcome("ue8m0")))


@pytest.mark.parametrize("name", sorted(CHANGES_NO_OUTPUT))
def test_a_fault_of_bookkeeping_alone_is_found_by_accounts_or_contracts(name):
    assert torch.equal(output_bits(outcome("ue8m0", name)), output_bits(outcome("ue8m0")))
    checks = {finding.check for finding in outcome("ue8m0", name).result.findings}
    assert checks
    assert checks <= {"accounts", "contract", "contract: moves"}


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
    result = outcome("ue8m0", name, f"checker_blinded:check='{check}'").result
    assert result.first_divergence is None
    assert result.findings == ()


@pytest.mark.parametrize(("name", "check"), BLINDABLE.items())
def test_a_fault_is_visible_while_another_check_is_blinded(name, check):
    result = outcome("ue8m0", name, "checker_blinded:check='router rule'").result
    assert result.first_divergence.check == check


def test_a_blinded_check_cannot_be_read_as_agreement():
    result = outcome("ue8m0", "checker_blinded:check=band").result
    (band,) = [check for check in result.checks if check.name == "band"]
    assert (band.verdict, band.detail) == ("failed", "blinded by an injected fault")
    assert result.verdict == "failed"
    assert "could not judge band" in result.summary


@pytest.mark.parametrize("stage", list(Stage))
def test_a_rank_that_raises_fails_the_run_with_rank_and_stage(stage):
    result = outcome("ue8m0", f"rank_raises:rank=2,stage={stage}").result
    assert result.verdict == "failed"
    assert f"rank 2 raised in stage {stage} " in result.summary
    ended = {info.rank: (info.verdict, info.stage) for info in result.ranks}
    assert ended[2] == ("raised", stage)
    assert {ended[rank][0] for rank in (0, 1, 3)} == {"released"}


def test_a_rank_that_skips_the_combine_fails_the_run_with_rank_and_stage():
    result = outcome("ue8m0", "combine_skipped:rank=2").result
    assert result.verdict == "failed"
    assert "deadlock in stage combine: rank 2 left without taking part" in result.summary
    assert {info.rank for info in result.ranks if info.verdict == "hung"} == {2}


def test_two_faults_are_both_found():
    result = outcome("ue8m0", "tokens_swapped:rank=2", "topk_weights_twice:rank=0").result
    found = {(finding.stage, finding.rank) for finding in result.findings}
    assert found == {(Stage.DISPATCH, 2), (Stage.POST_PERMUTE, 0)}


@pytest.mark.parametrize(
    ("setting", "fault"),
    [("bf16", "scale_rounded_down"), ("ue8m0", "local_ids_left_global:rank=0")],
)
def test_a_fault_that_finds_nothing_to_act_on_is_said(setting, fault):
    result = outcome(setting, fault).result
    assert result.verdict == "agree"
    assert f"fault {fault.partition(':')[0]} found nothing to act on" in result.summary


def test_a_fault_that_acts_is_not_said_to_be_idle():
    assert "nothing to act on" not in outcome("ue8m0", "partial_dropped").result.summary
