"""Sweeps: which rows they have, which of them rules refuse, and what is wrong with a file."""

from itertools import combinations

import pytest

from scenarios.errors import ScenarioError
from scenarios.loader import LoadedScenario, load_scenario
from scenarios.sweep import ExpandedSweep, load_path

LEGAL = [
    "tp+standard+extend",
    "tp+standard+decode",
    "dp+standard+extend",
    "dp+standard+decode",
    "dp+deepep_normal+extend",
    "dp+deepep_normal+decode",
]


def legal_names(sweep: ExpandedSweep) -> list[str]:
    return [row.name for row, _ in sweep.legal]


def test_rows_are_the_product_of_the_axes_the_last_one_fastest(expanded):
    assert legal_names(expanded()) == LEGAL
    assert expanded().num_rows == 2 * 2 * 2


def test_a_row_is_the_scenario_that_a_file_of_its_own_would_be(expanded, tmp_path):
    path = tmp_path / "alone.yaml"
    path.write_text("""\
name: dp+deepep_normal+decode
model:
  preset: deepseek_v4
  overrides: {hidden_size: 256, moe_intermediate_size: 256, n_routed_experts: 8}
parallel: {world_size: 2, attention: {dp: 2}, moe: {ep: 2}}
moe: {dispatcher: deepep_normal, recipe: bf16}
platform: sm100
batch: {phase: decode, tokens: [5, 0]}
inputs: {modes: [random], seed: 7}
""")
    (row, scenario) = expanded().legal[-1]
    alone = load_scenario(path)
    assert scenario.scenario == alone.scenario
    assert (scenario.model, scenario.notes) == (alone.model, alone.notes)
    assert row.values == {
        "topology": "dp",
        "moe.dispatcher": "deepep_normal",
        "batch.phase": "decode",
    }


def test_a_row_that_rules_refuse_says_which(expanded):
    refused = {row.name: [rule.name for rule in rules] for row, rules in expanded().refused}
    assert refused == {
        "tp+deepep_normal+extend": ["all_to_all_needs_whole_experts"],
        "tp+deepep_normal+decode": ["all_to_all_needs_whole_experts"],
    }


def test_refusals_are_counted_by_rule(expanded):
    (refusal,) = expanded().refusals()
    assert (refusal.rule.name, refusal.num_rows, refusal.first) == (
        "all_to_all_needs_whole_experts",
        2,
        "tp+deepep_normal+extend",
    )
    assert refusal.rule.message.endswith("moe tp must be 1, is 2")


def test_the_rule_that_refuses_most_rows_comes_first(expanded):
    masked = ("recipe: bf16}", "recipe: bf16, layout: masked}")
    refusals = expanded(masked).refusals()
    assert [(refusal.rule.name, refusal.num_rows) for refusal in refusals] == [
        ("layout_is_the_dispatchers", 4),
        ("all_to_all_needs_whole_experts", 2),
    ]


def test_a_value_that_no_legal_row_has_is_known(expanded):
    masked = ("recipe: bf16}", "recipe: bf16, layout: masked}")
    assert expanded(masked).values_without_a_row() == [("moe.dispatcher", "deepep_normal")]
    assert expanded().values_without_a_row() == []


def test_rows_are_left_out_with_the_reason(expanded):
    sweep = expanded(
        more="""\
exclude:
  - {topology: dp, moe.dispatcher: [standard, deepep_normal], batch.phase: decode, because: slow}
"""
    )
    assert [(row.name, because) for row, because in sweep.excluded] == [
        ("dp+standard+decode", "slow"),
        ("dp+deepep_normal+decode", "slow"),
    ]
    assert legal_names(sweep) == [
        "tp+standard+extend",
        "tp+standard+decode",
        "dp+standard+extend",
        "dp+deepep_normal+extend",
    ]


@pytest.mark.parametrize(
    ("given", "name"),
    [("true", "true"), ("0.5", "0.5"), ("12", "12"), ("[7, 0]", "7-0")],
    ids=["truth value", "decimal", "whole number", "list"],
)
def test_a_value_of_a_key_is_named_by_itself(expanded, given, name):
    key = {"true": "moe.strict_shapes", "0.5": "run.timeout_s", "12": "inputs.seed"}
    changes = [("batch.phase: [extend, decode]", f"{key.get(given, 'batch.tokens')}: [{given}]")]
    if given == "[7, 0]":
        changes += [(", batch.tokens: [9]}", "}"), (", batch.tokens: [5, 0]}", "}")]
    assert legal_names(expanded(*changes))[-1] == f"dp+deepep_normal+{name}"


@pytest.mark.parametrize(
    ("assignment", "left"),
    [
        ("topology=dp", LEGAL[2:]),
        ("moe.dispatcher=deepep_normal", LEGAL[4:]),
        ("moe.dispatcher=deepep_ll", ["dp+deepep_ll+extend", "dp+deepep_ll+decode"]),
    ],
    ids=["named value", "value of a key", "another value of a key"],
)
def test_set_leaves_one_value_of_an_axis(expanded, assignment, left):
    assert legal_names(expanded(overrides=[assignment])) == left


def test_set_of_another_key_holds_in_every_row(expanded):
    sweep = expanded(overrides=["platform=sm90", "parallel.attention.dp=1"])
    assert {row.scenario.platform for _, row in sweep.legal} == {"sm90"}
    assert legal_names(sweep) == ["tp+standard+extend", "tp+standard+decode"]


def test_what_a_row_selects_leaves_this_row_alone(expanded):
    changes = [
        ("batch.phase: [extend, decode]", "batch.tokens: [[5, 0], [1, 2]]"),
        (", batch.tokens: [9]}", "}"),
        (", batch.tokens: [5, 0]}", "}"),
    ]
    legal = expanded(*changes).legal
    assert len(legal) == 4
    for row, scenario in legal:
        ((same, again),) = expanded(*changes, overrides=row.selects).legal
        assert (same, again.scenario) == (row, scenario.scenario)


def test_injected_faults_are_in_every_row(expanded):
    sweep = expanded(injects=["tokens_swapped"], known_faults=["tokens_swapped"])
    assert {row.scenario.inject for _, row in sweep.legal} == {("tokens_swapped",)}


def test_a_scenario_file_is_no_sweep(written):
    assert isinstance(load_path(written()), LoadedScenario)


def test_exclusions_that_leave_no_row_are_refused(problems):
    assert problems(more="exclude: [{batch.phase: [extend, decode], because: all}]\n") == [
        "exclude: leaves no row"
    ]


def test_a_sweep_without_a_legal_row_is_refused_with_the_rules(problems):
    (problem,) = problems(overrides=["topology=tp", "moe.dispatcher=deepep_normal"])
    assert problem.startswith("parallel.moe.tp: no row is legal; 2 of 2: deepep_normal moves ")


@pytest.mark.parametrize(
    ("assignment", "said"),
    [
        ("topology=ep", "--set: topology: 'ep' is not one of tp, dp"),
        ("moe.dispatcher={a: 1}", "--set: moe.dispatcher: '{a: 1}' makes no name"),
        ("moe.dispatcher=deepep", "--set: moe.dispatcher: 'deepep' is not one of"),
        ("moe.recip=bf16", "--set: moe.recip: unknown key"),
    ],
    ids=["named value", "nameless value", "value of a key", "key"],
)
def test_a_wrong_set_is_refused(problems, assignment, said):
    (problem,) = problems(overrides=[assignment])
    assert problem.startswith(said)


def test_a_product_that_nobody_means_is_refused(problems):
    many = f"batch.phase: {list(range(400))}\n  inputs.seed: {list(range(400))}"
    (problem,) = problems(("batch.phase: [extend, decode]", many))
    assert problem == "axes: 640000 rows; more than 100000 take --yes, or `strategy: pairs`"


def test_pairs_are_chosen_among_the_legal_rows_and_cover_what_they_cover(expanded):
    every, some = expanded(), expanded(more="strategy: pairs\n")
    assert set(legal_names(some)) <= set(LEGAL)
    assert pairs(some) == pairs(every)
    assert (some.coverage.num_asked, some.coverage.num_covered) == (12, 11)
    assert some.coverage.impossible == {("all_to_all_needs_whole_experts",): 1}


def test_an_exclusion_is_no_row_and_makes_its_combinations_impossible(expanded):
    left_out = "exclude: [{topology: dp, batch.phase: decode, because: slow}]\nstrategy: pairs\n"
    some = expanded(more=left_out)
    assert not any(name.startswith("dp") and name.endswith("decode") for name in legal_names(some))
    assert some.coverage.impossible[("excluded: slow",)] == 1


def test_triples_of_two_axes_are_pairs(expanded):
    assert (
        expanded(
            ("  batch.phase: [extend, decode]\n", ""), more="strategy: triples\n"
        ).coverage.strength
        == 2
    )


def test_each_row_runs_once_a_seed_whichever_are_chosen(expanded):
    some = expanded(more="strategy: pairs\nseeds: [3, 5]\n")
    rows = [(row.name, loaded.scenario.inputs.seed) for row, loaded in some.legal]
    alone = legal_names(expanded(more="strategy: pairs\n"))
    assert rows == [(f"{name}+{seed}", seed) for name in alone for seed in (3, 5)]


def test_a_seed_is_set_like_the_value_of_an_axis(expanded):
    some = expanded(more="seeds: [3, 5]\n", overrides=["inputs.seed=5"])
    assert legal_names(some) == [f"{name}+5" for name in LEGAL]


def test_a_large_product_is_multiplied_out_when_asked(expanded):
    assert expanded(most_rows=None).num_rows == 8
    with pytest.raises(ScenarioError, match="8 rows; more than 7 take --yes"):
        expanded(most_rows=7)


def test_what_the_chosen_rows_set_wrong_is_a_problem_of_the_file(problems):
    (problem,) = problems(("[extend, decode]", "[extend, decod]"), more="strategy: pairs\n")
    assert "decod" in problem


def pairs(sweep):
    return {pair for row, _ in sweep.legal for pair in combinations(sorted(row.values.items()), 2)}
