"""A scenario becomes one plan for ranks and verdict; what cannot run says why."""

import re

import pytest

from actors.resolve import arm_faults, reasons_not_to_run, resolve
from moe.formats import DispatchFormat, GatedActivation
from scenarios.errors import ScenarioError


def test_the_plan_holds_the_models_numbers(load):
    plan = resolve(load()).plan
    assert plan.layout.world == (0, 1)
    assert (plan.layout.attn_dp, plan.layout.ep) == (2, 2)
    assert plan.sync.entry == ((0, 1, 2, 3, 4), (5, 6, 7))
    assert (plan.num_experts, plan.routing.top_k) == (8, 6)
    assert (plan.routed_scaling_factor, plan.activation) == (1.5, GatedActivation(limit=10.0))
    assert plan.dispatch_format is DispatchFormat.DEEPEP_NORMAL
    assert (plan.row_alignment, plan.seed) == (128, 7)


def test_the_verdict_is_told_the_same_facts_as_the_ranks(load):
    resolved = resolve(load())
    plan, judged = resolved.plan, resolved.judged
    assert judged.slot_experts == (0, 1, 2, 3, 4, 5, 6, 7)
    assert (judged.layout, judged.sync) == (plan.layout, plan.sync)
    assert (judged.hidden_size, judged.top_k) == (256, 6)
    assert (judged.recipe, judged.scale_format) == (plan.recipe, plan.scale_format)


@pytest.mark.parametrize(("platform", "block"), [("sm90", 128), ("sm100", None)])
def test_the_declared_arithmetic_follows_the_scale_format(load, platform, block):
    resolved = resolve(load(f"platform={platform}"))
    assert resolved.judged.arithmetic.scaled_block == block


@pytest.mark.parametrize("fault", ["rank_dies", "rank_hangs"])
def test_a_fault_that_needs_a_process_does_not_run_on_loopback(load, fault):
    (reason,) = reasons_not_to_run(load(inject=(fault,)))
    assert f"fault {fault} ends or stops a process" in reason
    assert reasons_not_to_run(load("run.runtime=ray", inject=(fault,))) == []


def test_a_scenario_that_runs_has_no_reason_against_it(load):
    assert reasons_not_to_run(load()) == []


def test_what_this_version_lacks_is_a_reason(load):
    (reason,) = reasons_not_to_run(load("run.device=cuda"))
    assert "cuda" in reason


def test_every_wrong_fault_is_listed_at_once(load):
    loaded = load(inject=("tokens_swaped", "tokens_swapped:row=x", "tokens_swapped:rank=9"))
    with pytest.raises(ScenarioError) as caught:
        arm_faults(loaded)
    text = str(caught.value)
    assert "3 problem(s)" in text
    for part in ("did you mean 'tokens_swapped'?", "row='x' is no int", "rank=9 is not 'auto'"):
        assert re.search(re.escape(part), text)


def test_the_same_scenario_gives_the_same_plan(load):
    assert resolve(load()).plan.fingerprint() == resolve(load()).plan.fingerprint()


@pytest.mark.parametrize(
    "change", ["inputs.seed=8", "batch.tokens=[3, 5]", "platform=sm90", "moe.recipe=bf16"]
)
def test_another_scenario_gives_another_fingerprint(load, change):
    assert resolve(load()).plan.fingerprint() != resolve(load(change)).plan.fingerprint()
