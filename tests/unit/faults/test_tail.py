"""Faults of the layer's end: the shared expert, the scaling factor, who reduces."""

from dataclasses import dataclass

import pytest
import torch

from moe.faults.tail import (
    reduced_in_tail_too,
    reduced_sum_stale,
    scaling_factor_missing,
    scaling_factor_twice,
    shared_expert_missing,
    shared_expert_per_rank,
    shared_expert_split,
    where_the_factor_acts,
    where_the_factor_acts_again,
)
from moe.formats import DispatchFormat, Stage
from moe.stages import TailOutput
from tests.unit.faults.values import context, shared_output
from topology.layout import ParallelLayout
from topology.sync import Reducer, SyncOptions, SyncPlan, sync_plan


def row(value):
    return torch.full((1, 1), value, dtype=torch.bfloat16)


FAULTY = pytest.mark.parametrize(
    ("fault", "output"),
    [
        (shared_expert_per_rank, 5 + 3 * 3),
        (shared_expert_missing, 5 - 3),
        (shared_expert_split, 5 - 3 * 0.75),
    ],
    ids=["once a rank", "missing", "divided"],
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
    dispatch_format: DispatchFormat
    routed_scaling_factor: float
    tail_scaling_factor: float
    sync: SyncPlan

    @property
    def factors(self):
        """In the sum over a rank's routes, and in the tail."""
        return self.routed_scaling_factor, self.tail_scaling_factor


def plan_of(dispatch_format, layout, tokens):
    a2a = dispatch_format is not DispatchFormat.STANDARD
    sync = sync_plan(layout, tokens, a2a=a2a, extend=True, options=SyncOptions())
    in_tail = 1.5 if dispatch_format is DispatchFormat.DEEPEP_NORMAL else 1.0
    return Plan(dispatch_format, 1.5, in_tail, sync)


DP_EP = ParallelLayout(attn_dp=2, ep=2)
A2A = plan_of(DispatchFormat.DEEPEP_NORMAL, DP_EP, (3, 1))
FLASHINFER = plan_of(DispatchFormat.FLASHINFER, DP_EP, (3, 1))
SCATTERED = plan_of(DispatchFormat.STANDARD, DP_EP, (3, 1))
REPLICATED = plan_of(DispatchFormat.STANDARD, ParallelLayout(attn_dp=1, attn_tp=2, ep=2), (3,))
WHERE = pytest.mark.parametrize(
    ("plan", "once", "again"),
    [
        (A2A, Stage.TAIL, Stage.TAIL),
        (FLASHINFER, Stage.POST_PERMUTE, Stage.TAIL),
        (SCATTERED, Stage.POST_PERMUTE, Stage.POST_PERMUTE),
        (REPLICATED, Stage.POST_PERMUTE, Stage.POST_PERMUTE),
    ],
    ids=["all-to-all", "flashinfer", "reduce-scatter", "all-reduce"],
)


@WHERE
def test_the_factor_acts_where_format_and_topology_have_it(plan, once, again):
    assert where_the_factor_acts(plan, {}) is once
    assert where_the_factor_acts_again(plan, {}) is again


@pytest.mark.parametrize(
    ("plan", "factors"),
    [(A2A, (1.5, 2.25)), (FLASHINFER, (1.5, 1.5)), (SCATTERED, (2.25, 1.0))],
    ids=["all-to-all", "flashinfer", "reduce-scatter"],
)
def test_the_factor_acts_once_more_at_that_stage(plan, factors):
    assert scaling_factor_twice(plan, {}, 0).factors == factors


@pytest.mark.parametrize(
    "plan", [A2A, FLASHINFER, SCATTERED], ids=lambda plan: plan.dispatch_format
)
def test_the_factor_acts_nowhere(plan):
    assert scaling_factor_missing(plan, {}, 0).factors == (1.0, 1.0)


def test_a_sum_that_glue_out_takes_is_taken_in_the_tail_too():
    edited = reduced_in_tail_too(SCATTERED, {}, 0).sync
    assert (edited.reducer, edited.returning) == (Reducer.TAIL, SCATTERED.sync.returning)


@pytest.mark.parametrize("plan", [A2A, REPLICATED], ids=["all-to-all", "all-reduce"])
def test_a_sum_without_another_behind_it_cannot_be_taken_too_early(plan):
    assert reduced_in_tail_too(plan, {}, 0) is plan


def summed(reduced, output):
    return TailOutput(
        shared=shared_output(3.0), output=row(output), summand=row(1.0), reduced=row(reduced)
    )


def test_the_sum_of_the_forward_before_takes_the_place_of_this_ones():
    there = context(earlier={Stage.TAIL: summed(8.0, 11.0)})
    wrong = reduced_sum_stale(summed(2.0, 5.0), there)
    assert (wrong.reduced.item(), wrong.output.item(), wrong.summand.item()) == (8, 8 + 3, 1)


@pytest.mark.parametrize(
    "earlier",
    [
        {},
        {Stage.TAIL: TailOutput(shared=None, output=row(5.0))},
        {Stage.TAIL: TailOutput(shared=None, output=row(5.0), reduced=torch.zeros(2, 1))},
    ],
    ids=["first forward", "nothing summed", "other rows"],
)
def test_without_an_earlier_sum_of_the_same_rows_none_is_stale(earlier):
    finished = summed(2.0, 5.0)
    assert reduced_sum_stale(finished, context(earlier=earlier)) is finished
