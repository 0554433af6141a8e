"""Facts of a layer that follow from its layout: who holds which experts, and which part of them."""

from dataclasses import replace

import pytest

from moe.formats import DispatchFormat, SharedExpertMode
from reports.verdict.layer import JudgedLayer, Shard
from topology.layout import ParallelLayout
from topology.sync import Reducer

HYBRID = ParallelLayout(attn_dp=1, attn_tp=4, ep=2, moe_tp=2)
TWO_SPARE_SLOTS = (0, 1, 2, 0, 3, 4, 5, 4)


@pytest.fixture
def layer(clean_ue8m0) -> JudgedLayer:
    """Six experts in eight slots of two EP ranks, each shared by two MoE-TP ranks."""
    return replace(
        clean_ue8m0.resolved.judged,
        layout=HYBRID,
        num_experts=6,
        slot_experts=TWO_SPARE_SLOTS,
        shared=SharedExpertMode.TP_SHARDED,
    )


def test_ep_rank_counts_owners_and_not_ranks(layer):
    assert [layer.ep_rank(rank) for rank in range(4)] == [0, 0, 1, 1]


def test_an_ep_rank_holds_a_run_of_slots(layer):
    assert layer.slots_per_rank == 4
    assert [layer.local_experts(rank) for rank in range(4)] == [
        (0, 1, 2, 0),
        (0, 1, 2, 0),
        (3, 4, 5, 4),
        (3, 4, 5, 4),
    ]


def test_moe_tp_ranks_hold_parts_of_an_expert(layer):
    assert [layer.expert_shard(rank) for rank in range(4)] == [
        Shard(index=0, count=2),
        Shard(index=1, count=2),
        Shard(index=0, count=2),
        Shard(index=1, count=2),
    ]


def test_a_sharded_shared_expert_is_split_over_the_world(layer):
    assert [layer.shared_shard(rank).index for rank in range(4)] == [0, 1, 2, 3]
    assert layer.shared_shard(0).count == 4


@pytest.mark.parametrize("shared", [SharedExpertMode.REPLICATED, SharedExpertMode.LOCAL, None])
def test_any_other_shared_expert_is_whole(layer, shared):
    assert replace(layer, shared=shared).shared_shard(3) == Shard(index=0, count=1)


@pytest.mark.parametrize(
    ("shared", "reducer", "ranks"),
    [
        (SharedExpertMode.TP_SHARDED, Reducer.GLUE_OUT, [0, 1, 2, 3]),
        (SharedExpertMode.TP_SHARDED, Reducer.TAIL, [0, 1, 2, 3]),
        (SharedExpertMode.REPLICATED, Reducer.GLUE_OUT, [0]),
        (SharedExpertMode.REPLICATED, Reducer.TAIL, [0, 1, 2, 3]),
        (SharedExpertMode.REPLICATED, Reducer.COMBINE, [0, 1, 2, 3]),
        (SharedExpertMode.LOCAL, Reducer.GLUE_OUT, []),
        (None, Reducer.TAIL, []),
    ],
    ids=str,
)
def test_ranks_that_compute_the_shared_expert_in_the_tail(layer, shared, reducer, ranks):
    other = replace(layer, shared=shared, sync=replace(layer.sync, reducer=reducer))
    assert list(other.ranks_with_shared_in_tail) == ranks


@pytest.mark.parametrize("dispatch_format", DispatchFormat)
def test_every_format_but_standard_moves_tokens_to_their_experts(layer, dispatch_format):
    other = replace(layer, dispatch_format=dispatch_format)
    assert other.is_all_to_all is (dispatch_format.value != "standard")


def test_a_tokens_slots_include_fused_shared_experts(layer):
    routing = replace(layer.routing, top_k=6, num_fused_shared=1)
    assert replace(layer, routing=routing).top_k == 7


def test_the_factor_is_the_fp32_number_that_kernels_hold(layer):
    # 2.2 * 2^22 is 9227468.8
    assert replace(layer, routed_scaling_factor=2.2).factor == 9227469 / 2**22
