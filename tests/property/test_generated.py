"""A fixed slice of ``benchmarks/false_alarms.py``: any legal scenario, run cleanly, agrees."""

import pytest

from actors.driver import run_scenario
from benchmarks.generated import BASE, generated
from scenarios.loader import load_scenario

SLICE = range(8)


@pytest.mark.parametrize("number", SLICE)
def test_a_clean_run_of_a_generated_scenario_agrees(number):
    result = run_scenario(generated(number).loaded).result
    assert (result.verdict, result.findings) == ("agree", ())


def test_a_draw_can_be_repeated_on_the_command_line():
    one = generated(3)
    loaded = load_scenario(BASE, overrides=one.sets)
    assert (loaded.scenario, loaded.model) == (one.loaded.scenario, one.loaded.model)
    assert generated(3).sets == one.sets


def test_dispatchers_take_turns():
    drawn = {generated(number).loaded.scenario.moe.dispatcher for number in range(7)}
    assert len(drawn) == 7


def test_what_the_schema_refuses_is_counted_rule_by_rule():
    refused = sum((generated(number).refused for number in SLICE), generated(8).refused)
    assert refused["all_to_all_needs_whole_experts"] > 0
    assert "what this version runs" not in refused
