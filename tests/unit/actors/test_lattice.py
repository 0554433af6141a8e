"""The walk over topologies, and what a lattice says of itself."""

from functools import cache

import pytest

from actors.driver import run_scenario
from actors.lattice import broken_edge, lattice_sentence, with_lattice
from reports.comparison import Comparison, Lattice, LatticeNode, Likeness
from reports.record import Mode, Verdict
from reports.verdict.determinism import TOPOLOGY
from scenarios.loader import load_scenario

SMOKE = "scenarios/smoke/ep2_dp.yaml"
CHUNK = "first_chunk_for_all:rank=1"


@cache
def walked(*sets, inject=()):
    overrides = ("run.runtime=loopback", "compare=lattice", *sets)
    loaded = load_scenario(SMOKE, overrides=overrides, injects=inject)
    return with_lattice(loaded, run_scenario(loaded)).result


def edges(result):
    return [(edge.one, edge.other, edge.likeness, edge.stage) for edge in result.lattice.edges]


def test_every_legal_topology_is_a_node_and_has_an_edge_to_the_nearest():
    result = walked()
    assert [node.name for node in result.lattice.nodes] == ["ep1", "ep2", "cp2-ep2", "ep2_dp"]
    assert edges(result) == [
        ("ep1", "ep2", "rounding", "combine"),
        ("ep2", "cp2-ep2", "same_bits", None),
        ("ep2", "ep2_dp", "same_bits", None),
    ]


def test_refused_topologies_are_listed_with_the_rules_reason():
    (refused,) = walked().lattice.refused
    assert (refused.name, refused.field) == ("tp2", "parallel.moe.tp")
    assert refused.source


def test_a_lattice_that_holds_says_where_bits_part_first():
    result = walked()
    assert (result.verdict, result.as_expected) == ("agree", True)
    assert result.summary.endswith(
        "; lattice: 4 topologies agree; bits part first from ep1 to ep2 in combine, as declared"
    )


@pytest.mark.parametrize(
    ("fault", "stage"),
    [("shared_expert_per_rank:rank=0", "tail"), (CHUNK, "glue_out")],
)
def test_a_fault_of_some_topologies_is_pinned_to_the_edge_that_brings_it_in(fault, stage):
    """One rank counts the shared expert once in any case, and has no chunk but the first."""
    result = walked(inject=(fault,))
    broken = broken_edge(result.lattice)
    assert (broken.one, broken.other) == ("ep1", "ep2")
    assert f"stage {stage}" in broken.reason
    assert "lattice: from ep1 to ep2 it breaks" in result.summary


EXACT = "inputs.modes=[exact]"


def test_on_exact_inputs_no_certified_bit_parts_anywhere():
    result = walked(EXACT)
    assert edges(result) == [
        ("ep1", "ep2", "same_bits", None),
        ("ep2", "cp2-ep2", "same_bits", None),
        ("ep2", "ep2_dp", "same_bits", None),
    ]
    assert all(edge.num_cells >= 0.95 * 8 * 256 for edge in result.lattice.edges)
    assert result.summary.endswith("4 topologies agree; every certified bit is the same")


@pytest.mark.parametrize(
    ("fault", "rank"), [("scaling_factor_twice:rank=1", 1), ("shared_expert_per_rank:rank=0", 0)]
)
def test_on_exact_inputs_a_fault_of_some_topologies_is_pinned_to_edge_rank_and_token(fault, rank):
    """One rank has no rank 1, and counts the shared expert once in any case."""
    result = walked(EXACT, inject=(fault,))
    broken = broken_edge(result.lattice)
    assert (broken.one, broken.other, broken.mode) == ("ep1", "ep2", "exact")
    assert (broken.stage, broken.rank) == ("tail", rank)
    assert f"differ in tail on rank {rank} of ep2, first for token {broken.token};" in broken.reason
    assert broken.cells > 0


def test_another_topology_that_is_wrong_makes_the_scenario_a_discrepancy():
    """Only where ranks share tokens is there a chunk: the scenario's own ranks do not."""
    result = walked("expect={verdict: discrepancy, stage: glue_out}", inject=(CHUNK,))
    (topology,) = [check for check in result.checks if check.name == TOPOLOGY]
    assert (result.verdict, result.as_expected) == ("discrepancy", True)
    assert topology.verdict == "discrepancy"


def test_where_every_topology_is_wrong_no_edge_is_blamed():
    result = walked(inject=("scaling_factor_missing",))
    assert broken_edge(result.lattice) is None
    assert "lattice: no edge tells right from wrong; ep1: discrepancy" in result.summary


def test_a_scenario_whose_ranks_do_not_come_back_has_no_lattice():
    result = walked(inject=("rank_raises:rank=1,stage=tail",))
    assert (result.verdict, result.lattice) == ("failed", None)


def node(name, verdict="agree"):
    degrees = {"attention": {"dp": 1, "tp": 1, "cp": 1}, "moe": {"ep": 1, "tp": 1}}
    return LatticeNode(
        name=name, world_size=1, tokens=(3,), verdict=Verdict(verdict), summary=verdict, **degrees
    )


def edge(one, other, likeness):
    numbers = {"cells": 0, "num_cells": 4, "apart": 0.0}
    froms = ("one_from_golden", "other_from_golden", "one_from_ideal", "other_from_ideal")
    distances = dict.fromkeys(froms, 0.0)
    names = {"one": one, "other": other, "mode": Mode.RANDOM, "reason": "why"}
    return Comparison(**names, **numbers, **distances, likeness=Likeness(likeness))


def lattice(nodes, *edges):
    return Lattice(nodes=nodes, edges=edges, refused=())


def test_an_edge_between_two_wrong_topologies_is_not_the_one_that_breaks():
    nodes = [node("a", "discrepancy"), node("b", "discrepancy"), node("c")]
    edges = [edge("a", "b", "breaks"), edge("b", "c", "breaks")]
    assert broken_edge(lattice(nodes, *edges)) == edges[1]


def test_bits_that_part_without_a_declared_rounding_break_an_edge_of_right_topologies():
    one = lattice([node("a"), node("b")], edge("a", "b", "breaks"))
    assert lattice_sentence(one) == "lattice: from a to b it breaks: why"


def test_where_no_bit_differs_the_lattice_says_so():
    one = lattice([node("a"), node("b")], edge("a", "b", "same_bits"))
    assert lattice_sentence(one) == "lattice: 2 topologies agree; every bit is the same"
