"""The keys behind a refusal: what the rule read, and nothing else."""

import pytest

from scenarios.models import MoeModel
from scenarios.rules import SCENARIO_RULES, check_rules
from scenarios.rules.reading import keys_behind
from tests.unit.scenarios.rule_cases import BROKEN, build


def broken_by(right, name):
    changes, _ = BROKEN[name]
    scenario, model = build(right, changes)
    waived = scenario.model_copy(update={"allow_unsupported": False})
    strict = waived.moe.model_copy(update={"strict_shapes": True})
    scenario = waived.model_copy(update={"moe": strict})
    (broken,) = (rule for rule in check_rules(scenario, model).problems if rule.name == name)
    return broken, scenario, model


@pytest.mark.parametrize("name", BROKEN)
def test_a_watched_rule_says_what_it_says_unwatched_and_reads_something(right, name):
    assert keys_behind(*broken_by(right, name))


def test_the_keys_are_those_that_the_check_came_to(right):
    broken, scenario, model = broken_by(right, "all_to_all_needs_whole_experts")
    assert keys_behind(broken, scenario, model) == {"moe.dispatcher", "parallel.moe.tp"}


def test_a_rule_that_can_be_waived_is_due_to_the_waiver_too(right):
    names = {rule.name for rule in SCENARIO_RULES if rule.kind == "policy"}
    for name in names & set(BROKEN):
        assert "allow_unsupported" in keys_behind(*broken_by(right, name))


def test_a_rule_on_sizes_is_due_to_the_model(right):
    names = [name for name in BROKEN if name not in {rule.name for rule in SCENARIO_RULES}]
    broken, scenario, model = broken_by(right, names[0])
    assert isinstance(model, MoeModel)
    assert "model" in keys_behind(broken, scenario, model)
