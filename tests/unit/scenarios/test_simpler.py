"""Fewer modes and rounds, a simpler recipe, features off: which steps there are."""

import pytest

from moe.faults import FAULTS
from scenarios.loader import load_scenario
from scenarios.sections import SwitchesSpec
from scenarios.simpler import PLAIN, faults, features, modes, recipes, rounds

SMOKE = "scenarios/smoke/ep2_dp.yaml"


def load(*sets, injects=()):
    return load_scenario(SMOKE, overrides=sets, injects=injects, known_faults=FAULTS)


def words(ladder):
    return [change.what for change in ladder]


def test_each_mode_is_tried_alone():
    (ladder,) = modes(load("inputs.modes=[exact, random]"))
    assert [change.sets["inputs"]["modes"] for change in ladder] == [["exact"], ["random"]]


@pytest.mark.parametrize("ladders_of", [modes, rounds, faults])
def test_a_scenario_with_one_of_each_has_nothing_to_lose(ladders_of):
    (ladder,) = ladders_of(load(injects=["tokens_swapped"]))
    assert ladder == ()


def test_rounds_go_to_one_first():
    (ladder,) = rounds(load("run.rounds=3"))
    assert [change.sets["run.rounds"] for change in ladder] == [1, 2]


def test_each_of_several_faults_is_left_out():
    (ladder,) = faults(load(injects=["tokens_swapped", "partial_dropped"]))
    assert [change.sets["inject"] for change in ladder] == [["partial_dropped"], ["tokens_swapped"]]


@pytest.mark.parametrize(
    ("recipe", "simpler"),
    [("bf16", []), ("fp8_block128", ["bf16"]), ("mxfp8", ["bf16", "fp8_block128"])],
)
def test_simpler_recipes_are_those_before_it(recipe, simpler):
    (ladder,) = recipes(load(f"moe.recipe={recipe}"))
    assert [change.sets["moe.recipe"] for change in ladder] == simpler


def test_the_features_of_the_model_and_of_the_scenario_can_go():
    features_on = features(load("moe.redundant_experts=2", "moe.switches.deterministic=true"))
    assert words(features_on) == [
        "n_shared_experts 1 -> 0",
        "swiglu_limit 10.0 -> None",
        "routed_scaling_factor 1.5 -> 1.0",
        "moe.redundant_experts 2 -> 0",
        "moe.switches.deterministic True -> False",
    ]


def test_expert_groups_go_as_one():
    v3 = "{preset: deepseek_v3, overrides: {hidden_size: 256, moe_intermediate_size: 128, "
    ladder = features(load(f"model={v3}n_routed_experts: 16, n_group: 4, topk_group: 2}}}}"))
    (groups,) = [change for change in ladder if "n_group" in change.what]
    assert groups.sets == {"model.overrides.n_group": 1, "model.overrides.topk_group": 1}


def test_every_switch_has_a_plain_value():
    assert {f"moe.switches.{name}" for name in SwitchesSpec.model_fields} <= PLAIN.keys()
