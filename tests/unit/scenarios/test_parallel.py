"""A scenario's topology in the words of ``topology``: layout, and every option of the glue."""

import pytest

from scenarios.loader import load_scenario
from scenarios.parallel import parallel_layout, sync_of
from topology.layout import ParallelLayout
from topology.sync import Gather, Padding, Reducer, Return

STANDARD = ("moe.dispatcher=standard", "moe.shared_experts=replicated")
DECODE = "batch.phase=decode"
MOE_TP = ("moe.recipe=bf16", "parallel.moe={ep: 1, tp: 2}")


@pytest.fixture
def scenario(written):
    return lambda *settings: load_scenario(written(), overrides=settings).scenario


@pytest.mark.parametrize(
    ("parallel", "layout"),
    [
        (
            "{world_size: 4, attention: {dp: 2, tp: 2}, moe: {ep: 4}}",
            ParallelLayout(attn_dp=2, attn_tp=2, ep=4),
        ),
        (
            "{world_size: 4, attention: {dp: 2, cp: 2}, moe: {ep: 4}}",
            ParallelLayout(attn_dp=2, cp=2, ep=4),
        ),
    ],
    ids=["tp", "cp"],
)
def test_both_views_have_the_scenarios_degrees(scenario, parallel, layout):
    assert parallel_layout(scenario(f"parallel={parallel}")) == layout


def test_moe_tp_reaches_the_moe_view(scenario):
    assert parallel_layout(scenario(*STANDARD, *MOE_TP)) == ParallelLayout(
        attn_dp=2, ep=1, moe_tp=2
    )


@pytest.mark.parametrize(
    ("settings", "gather", "returning", "reducer"),
    [
        ((), Gather.NONE, Return.NONE, Reducer.COMBINE),
        (STANDARD, Gather.ALL_GATHER_V, Return.REDUCE_SCATTER_V, Reducer.GLUE_OUT),
        ((*STANDARD, *MOE_TP), Gather.ALL_REDUCE, Return.DP_SCATTER, Reducer.TAIL),
        (
            (*STANDARD, *MOE_TP, "moe.switches.dp_use_gatherv=true"),
            Gather.ALL_GATHER_V,
            Return.REDUCE_SCATTER_V,
            Reducer.GLUE_OUT,
        ),
        ((*STANDARD, *MOE_TP, DECODE), Gather.ALL_GATHER, Return.DP_SCATTER, Reducer.TAIL),
        (
            (*STANDARD, *MOE_TP, DECODE, "moe.switches.dp_use_reduce_scatter=true"),
            Gather.ALL_GATHER,
            Return.REDUCE_SCATTER,
            Reducer.GLUE_OUT,
        ),
        (
            (*STANDARD, *MOE_TP, DECODE, "moe.reduce=reduce_scatter"),
            Gather.ALL_GATHER,
            Return.REDUCE_SCATTER,
            Reducer.GLUE_OUT,
        ),
    ],
    ids=[
        "all to all",
        "dp x ep",
        "dp x tp",
        "gatherv",
        "decode",
        "decode, reduce_scatter switch",
        "decode, reduce_scatter asked for",
    ],
)
def test_dispatcher_phase_and_switches_choose_the_flow(
    scenario, settings, gather, returning, reducer
):
    plan = sync_of(scenario(*settings))
    assert (plan.gather, plan.returning, plan.reducer) == (gather, returning, reducer)


@pytest.mark.parametrize(
    ("settings", "padding", "slots"),
    [
        ((), Padding.SUM_LEN, (5, 3)),
        ((DECODE,), Padding.MAX_LEN, (5, 5)),
        ((DECODE, "batch.tokens=[5, 0]"), Padding.MAX_LEN, (5, 5)),
        (("batch.padding=max_len",), Padding.MAX_LEN, (5, 5)),
        ((DECODE, "batch.padding=sum_len"), Padding.SUM_LEN, (5, 3)),
    ],
    ids=["extend", "decode", "decode, half full", "max_len asked for", "sum_len asked for"],
)
def test_padding_follows_the_phase_or_what_was_asked_for(scenario, settings, padding, slots):
    plan = sync_of(scenario(*STANDARD, *settings))
    assert (plan.padding, plan.slots) == (padding, slots)


@pytest.mark.parametrize(
    ("dispatcher", "padding"),
    [("deepep_v2", Padding.MAX_LEN), ("deepep_normal", Padding.SUM_LEN)],
)
def test_slots_of_equal_length_can_be_forced_with_deepep_v2_alone(scenario, dispatcher, padding):
    switch = "moe.switches.deepep_v2_force_max_len=true"
    assert sync_of(scenario(f"moe.dispatcher={dispatcher}", switch)).padding is padding


@pytest.mark.parametrize(
    ("split", "shares"),
    [("zigzag", ((0, 3), (1, 2))), ("contiguous", ((0, 1), (2, 3)))],
)
def test_a_sequence_is_dealt_out_as_its_split_says(scenario, split, shares):
    cp = f"parallel.attention={{dp: 1, cp: 2, cp_split: {split}}}"
    assert sync_of(scenario(cp, "batch.tokens=[4]")).entry == shares
