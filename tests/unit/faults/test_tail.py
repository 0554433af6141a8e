"""Faults of the layer's end: the shared expert, the scaling factor, who reduces."""

from dataclasses import dataclass

import pytest
import torch

from moe.faults.tail import (
    reduced_in_tail_too,
    scaling_factor_missing,
    scaling_factor_twice,
    shared_expert_missing,
    shared_expert_per_rank,
    where_the_factor_acts,
)
from moe.formats import Stage
from moe.stages import TailOutput
from tests.unit.faults.values import context, shared_output
from topology.layout import ParallelLayout
from topology.sync import Reducer, SyncOptions, SyncPlan, sync_plan


def row(value):
    return torch.full((1, 1), value, dtype=torch.bfloat16)


FAULTY = pytest.mark.parametrize(
    ("fault", "output"),
    [(shared_expert_per_rank, 5 + 3 * 3), (shared_expert_missing, 5 - 3)],
    ids=["once a rank", "missing"],
)


@FAULTY
def test_more_or_less_of_the_shared_expert_is_in_the_output(fault, output):
    finished = TailOutput(shared=shared_output(3.0), output=row(5.0))
    assert fault(finished, context(num_ranks=4)).output.item() == output


@FAULTY
def test_a_summand_that_waits_for_its_sum_changes_with_the_output(fault, output):
    finished = TailOutput(shared=shared_output(3.0), output=row(5.0), summand=row(5.0))
    wrong = fault(finished, context(num_ranks=4))
    assert (wrong.output.item(), wrong.summand.item()) == (output, output)


@FAULTY
def test_what_has_been_summed_already_stays(fault, output):
    finished = TailOutput(
        shared=shared_output(3.0), output=row(5.0), summand=row(1.0), reduced=row(2.0)
    )
    wrong = fault(finished, context(num_ranks=4))
    assert (wrong.summand.item(), wrong.reduced.item(), wrong.output.item()) == (1, 2, output)


@pytest.mark.parametrize("fault", [shared_expert_per_rank, shared_expert_missing])
def test_without_a_shared_expert_the_tail_stays(fault):
    finished = TailOutput(shared=None, output=torch.ones(1, 1))
    assert fault(finished, context()) is finished


@dataclass(frozen=True)
class Plan:
    routed_scaling_factor: float = 1.5
    sync: SyncPlan | None = None


def plan_of(layout, tokens, *, a2a=False):
    sync = sync_plan(layout, tokens, a2a=a2a, extend=True, options=SyncOptions())
    return Plan(sync=sync)


A2A = plan_of(ParallelLayout(attn_dp=2, ep=2), (3, 1), a2a=True)
SCATTERED = plan_of(ParallelLayout(attn_dp=2, ep=2), (3, 1))
REPLICATED = plan_of(ParallelLayout(attn_dp=1, attn_tp=2, ep=2), (3,))


@pytest.mark.parametrize(
    ("fault", "factor"), [(scaling_factor_twice, 2.25), (scaling_factor_missing, 1.0)]
)
def test_the_factor_acts_twice_or_nowhere(fault, factor):
    assert fault(Plan(), {}, 0) == Plan(routed_scaling_factor=factor)


@pytest.mark.parametrize(
    ("plan", "stage"),
    [(A2A, Stage.TAIL), (SCATTERED, Stage.POST_PERMUTE), (REPLICATED, Stage.POST_PERMUTE)],
    ids=["all-to-all", "reduce-scatter", "all-reduce"],
)
def test_the_factor_acts_where_the_topology_has_it(plan, stage):
    assert where_the_factor_acts(plan, {}) is stage


def test_a_sum_that_glue_out_takes_is_taken_in_the_tail_too():
    edited = reduced_in_tail_too(SCATTERED, {}, 0).sync
    assert (edited.reducer, edited.returning) == (Reducer.TAIL, SCATTERED.sync.returning)


@pytest.mark.parametrize("plan", [A2A, REPLICATED], ids=["all-to-all", "all-reduce"])
def test_a_sum_without_another_behind_it_cannot_be_taken_too_early(plan):
    assert reduced_in_tail_too(plan, {}, 0) is plan
