"""Faults of load time: rows change places, and slots get experts that are not theirs."""

from dataclasses import dataclass, replace

import pytest
import torch

from moe.faults.weights import (
    MisloadedExperts,
    experts_strided,
    gate_up_swapped,
    placement_ignored,
    redundant_experts_not_counted,
    replica_left_behind,
)
from moe.placement import ExpertPlacement
from moe.quant.ue8m0 import mn_major
from tests.unit.faults.values import context, layer_weights
from topology.layout import ParallelLayout


class Source:
    """Weights whose expert is its own number."""

    def experts(self, expert_ids):
        return tuple(expert_ids)


@dataclass(frozen=True)
class Plan:
    num_experts: int
    layout: ParallelLayout
    redundant: int = 0
    shuffled_by: int | None = None
    weights: object = Source()


TWO_RANKS = Plan(num_experts=4, layout=ParallelLayout(attn_dp=2, ep=2))


def loaded(fault, plan, rank):
    """Experts that a rank loads under the fault; None where it changes nothing."""
    edited = fault(plan, {}, rank)
    if edited is plan:
        return None
    assert replace(edited, weights=plan.weights) == plan
    return edited.weights.experts(("whatever", "is asked"))


def test_gate_and_up_rows_change_places():
    weights = layer_weights(torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]))
    swapped = gate_up_swapped(weights, context())
    assert swapped.experts.w13.values.flatten().tolist() == [3.0, 4.0, 1.0, 2.0]
    assert swapped.experts.w2 is weights.experts.w2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=["fp32 blocks", "packed rows"])
def test_scales_follow_their_rows(dtype):
    values = torch.zeros(1, 4, 1).to(torch.float8_e4m3fn)
    scale = torch.tensor([[[1], [2], [3], [4]]], dtype=dtype)
    scale = mn_major(scale) if dtype == torch.int32 else scale
    swapped = gate_up_swapped(layer_weights(values, scale), context()).experts.w13.scale
    assert swapped.flatten().tolist() == [3, 4, 1, 2]
    assert swapped.stride() == scale.stride()


@pytest.mark.parametrize(("rank", "experts"), [(0, (0, 2)), (1, (1, 3))])
def test_strided_ranks_load_every_second_expert(rank, experts):
    assert loaded(experts_strided, TWO_RANKS, rank) == experts


def test_one_rank_alone_has_no_stride():
    alone = Plan(num_experts=4, layout=ParallelLayout(attn_dp=1, ep=1))
    assert loaded(experts_strided, alone, 0) is None


def test_ranks_that_share_an_expert_load_the_same_wrong_ones():
    hybrid = Plan(num_experts=4, layout=ParallelLayout(attn_dp=4, ep=2, moe_tp=2))
    assert [loaded(experts_strided, hybrid, rank) for rank in range(4)] == [
        (0, 2),
        (0, 2),
        (1, 3),
        (1, 3),
    ]


def test_a_placement_that_moves_no_expert_cannot_be_ignored():
    assert loaded(placement_ignored, TWO_RANKS, 1) is None


def test_an_ignored_placement_loads_experts_in_their_own_order():
    shuffled = replace(TWO_RANKS, num_experts=16, shuffled_by=7)
    due = ExpertPlacement(num_experts=16, ep_size=2, shuffled_by=7).local_experts(1)
    assert due != tuple(range(8, 16))
    assert loaded(placement_ignored, shuffled, 1) == tuple(range(8, 16))


@pytest.mark.parametrize(("rank", "experts"), [(0, None), (1, (2, 3, 0))])
def test_uncounted_replicas_move_the_first_expert_of_later_ranks(rank, experts):
    """Slots hold experts 0 1 2, 3 0 1."""
    redundant = replace(TWO_RANKS, redundant=2)
    assert loaded(redundant_experts_not_counted, redundant, rank) == experts


@pytest.mark.parametrize(("rank", "experts"), [(0, None), (1, (3, 1, 2))])
def test_a_replica_left_behind_holds_the_next_expert(rank, experts):
    assert loaded(replica_left_behind, replace(TWO_RANKS, redundant=2), rank) == experts


def test_common_weights_are_not_misloaded():
    class Common(Source):
        def common(self):
            return "common"

        def ideal_expert(self, expert_id):
            return expert_id

        def ideal_shared(self):
            return "shared"

    wrong = MisloadedExperts(source=Common(), loaded=(3,))
    assert (wrong.common(), wrong.ideal_expert(2), wrong.ideal_shared()) == ("common", 2, "shared")
