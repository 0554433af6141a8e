"""Other topologies of a scenario: which there are, and which the rules refuse."""

import pytest

from actors.topologies import Refused, topologies_of, with_topology
from tests.mutation.worlds import load


def named(loaded):
    return {topology.name: topology for topology in topologies_of(loaded)}


def legal(loaded):
    found = {name: with_topology(loaded, one) for name, one in named(loaded).items()}
    return [name for name, one in found.items() if not isinstance(one, Refused)]


def test_steps_are_powers_of_two_up_to_the_world_then_come_branches_and_the_scenario():
    assert list(named(load("a2a"))) == [
        *("ep1", "ep2", "ep4", "tp4", "ep2-tp2"),
        *("dp2-ep4", "dp4-ep4", "cp4-ep4", "ep2_dp"),
    ]


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("ep1", (1, 1, 1, 1, 1)),
        ("ep4", (1, 4, 1, 4, 1)),
        ("tp4", (1, 4, 1, 1, 4)),
        ("ep2-tp2", (1, 4, 1, 2, 2)),
        ("dp2-ep4", (2, 2, 1, 4, 1)),
        ("cp4-ep4", (1, 1, 4, 4, 1)),
    ],
)
def test_both_views_cover_the_same_ranks(name, degrees):
    topology = named(load("a2a"))[name]
    dp, tp, cp, ep, moe_tp = topology.degrees
    assert topology.degrees == degrees
    assert dp * tp * cp == ep * moe_tp == topology.world_size


@pytest.mark.parametrize(
    ("world", "names"),
    [
        ("a2a", ["ep1", "ep2", "ep4", "dp2-ep4", "dp4-ep4", "cp4-ep4", "ep2_dp"]),
        ("tp", ["ep1", "ep2", "tp2", "dp2-ep2", "cp2-ep2", "pure_tp"]),
        ("flashinfer decode", ["ep1", "ep2", "ep4", "dp4-ep4", "ep2_dp"]),
    ],
)
def test_rules_leave_out_what_a_dispatcher_has_not(world, names):
    assert legal(load(world)) == names


def test_a_refused_topology_says_which_rule_refuses_it():
    loaded = load("a2a")
    refused = with_topology(loaded, named(loaded)["tp4"])
    assert refused.rule.field == "parallel.moe.tp"
    assert "whole experts" in refused.rule.message


@pytest.mark.parametrize(
    ("name", "tokens"), [("ep4", (17,)), ("dp2-ep4", (9, 8)), ("ep2_dp", (5, 0, 9, 3))]
)
def test_the_list_is_dealt_out_anew_but_on_the_scenarios_own_ranks(name, tokens):
    loaded = load("a2a")
    assert with_topology(loaded, named(loaded)[name]).scenario.batch.tokens == tokens


@pytest.mark.parametrize(("name", "left"), [("ep2", ["topk_weights_twice"]), ("ep4", None)])
def test_a_fault_of_a_rank_that_is_not_there_is_left_out(name, left):
    loaded = load("a2a", "tokens_swapped:rank=3", "topk_weights_twice")
    faults = [fault.name for fault in with_topology(loaded, named(loaded)[name]).faults]
    assert faults == (left or ["tokens_swapped", "topk_weights_twice"])


def test_a_scenario_on_one_rank_has_no_other():
    one_rank = "parallel={world_size: 1, attention: {dp: 1}, moe: {ep: 1}}"
    loaded = load("a2a", sets=(one_rank, "batch.tokens=[9]"))
    assert {topology.degrees for topology in topologies_of(loaded)} == {(1, 1, 1, 1, 1)}
