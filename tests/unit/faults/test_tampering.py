"""One call of one rank is answered in another way, the rest passes; and which call that is."""

from dataclasses import dataclass

import pytest
import torch

from moe.faults.tampering import TamperedCollectives, stage_of_call
from moe.formats import DispatchFormat, Stage
from tests.unit.faults.values import context
from topology.layout import ParallelLayout
from topology.loopback import LoopbackWorld
from topology.sync import SyncOptions, SyncPlan, sync_plan

BOTH = (0, 1)


def shouted(call, inner, context):
    """An answer that no honest call gives."""
    return call.on(inner) + 1000


def each_verb(verbs):
    """Every verb twice, with vectors between: [what came back]."""
    rows = torch.tensor([[1.0], [2.0]])
    got = []
    for _ in range(2):
        verbs.all_gather_v(torch.tensor([verbs.rank]), (1, 1), BOTH)
        got += [
            verbs.all_gather_v(rows, (2, 2), BOTH),
            verbs.all_to_all_v(rows, (1, 1), (1, 1), BOTH),
            verbs.all_reduce(rows, BOTH),
            verbs.reduce_scatter_v(rows, (1, 1), BOTH),
        ]
    return [tensor.flatten().tolist() for tensor in got]


CLEAN = {0: [[1, 2, 1, 2], [1, 1], [2, 4], [2]], 1: [[1, 2, 1, 2], [2, 2], [2, 4], [4]]}
PLACES = {"all_gather_v": 0, "all_to_all_v": 1, "all_reduce": 2, "reduce_scatter_v": 3}


@pytest.mark.parametrize("occurrence", [0, 1])
@pytest.mark.parametrize("op", PLACES)
def test_the_named_call_of_the_rank_is_answered_in_another_way(op, occurrence):
    def program(collectives):
        if collectives.rank == 0:
            return each_verb(collectives)
        meant = context(op=op, occurrence=occurrence)
        return each_verb(TamperedCollectives(collectives, meant, shouted))

    honest, tampered = LoopbackWorld(2).run(program)
    assert honest == CLEAN[0] * 2
    due = [list(got) for got in CLEAN[1] * 2]
    at = PLACES[op] + 4 * occurrence
    due[at] = [value + 1000 for value in due[at]]
    assert tampered == due


def test_a_call_that_is_not_made_is_not_tampered_with():
    def program(collectives):
        meant = context(op="all_reduce", occurrence=2)
        return each_verb(TamperedCollectives(collectives, meant, shouted))

    assert LoopbackWorld(2).run(program) == [CLEAN[0] * 2, CLEAN[1] * 2]


@dataclass(frozen=True)
class Plan:
    sync: SyncPlan
    layout: ParallelLayout
    dispatch_format: DispatchFormat
    gathers_fp8: bool = False


def plan_of(layout, tokens, *, a2a=False, fp8=False):
    sync = sync_plan(layout, tokens, a2a=a2a, extend=True, options=SyncOptions())
    dispatch_format = DispatchFormat.DEEPEP_NORMAL if a2a else DispatchFormat.STANDARD
    return Plan(sync=sync, layout=layout, dispatch_format=dispatch_format, gathers_fp8=fp8)


TP = plan_of(ParallelLayout(attn_dp=1, attn_tp=2, ep=2), (3,))
GATHERED = plan_of(ParallelLayout(attn_dp=2, attn_tp=2, ep=4), (3, 4))
SCATTERED = plan_of(ParallelLayout(attn_dp=2, ep=2), (3, 4))
FP8 = plan_of(ParallelLayout(attn_dp=2, ep=2), (3, 4), fp8=True)
HALVES = plan_of(ParallelLayout(attn_dp=2, attn_tp=2, ep=4), (3, 4), a2a=True)


@pytest.mark.parametrize(
    ("plan", "op", "occurrence", "stage"),
    [
        (TP, "all_reduce", 0, Stage.TAIL),
        (GATHERED, "all_reduce", 0, Stage.GLUE_IN),
        (GATHERED, "all_reduce", 1, Stage.TAIL),
        (SCATTERED, "all_gather_v", 0, Stage.GLUE_IN),
        (SCATTERED, "reduce_scatter_v", 0, Stage.GLUE_OUT),
        (FP8, "all_gather_v", 1, Stage.GLUE_IN),
        (HALVES, "all_to_all_v", 0, Stage.DISPATCH),
        (HALVES, "all_to_all_v", 1, Stage.DISPATCH),
        (HALVES, "all_to_all_v", 2, Stage.COMBINE),
        (HALVES, "all_gather_v", 0, Stage.GLUE_OUT),
    ],
)
def test_a_call_belongs_to_the_stage_where_the_topology_makes_it(plan, op, occurrence, stage):
    assert stage_of_call(plan, {"op": op, "occurrence": occurrence}) is stage


def test_a_call_that_no_topology_makes_has_no_stage():
    with pytest.raises(ValueError, match="1 calls of all_reduce, no 1"):
        stage_of_call(TP, {"op": "all_reduce", "occurrence": 1})
