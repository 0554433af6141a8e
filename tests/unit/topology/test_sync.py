"""Which glue a topology has, written out row by row, and what has none."""

import pytest

from topology.layout import ParallelLayout
from topology.sync import (
    Gather,
    Padding,
    Reducer,
    Return,
    SyncOptions,
    SyncPlan,
    sync_plan,
)

DP2 = ParallelLayout(attn_dp=2, ep=2)
DP2_TP_MOE = ParallelLayout(attn_dp=2, ep=1, moe_tp=2)
DP2_TP2 = ParallelLayout(attn_dp=2, attn_tp=2, ep=4)
TP4 = ParallelLayout(attn_dp=1, attn_tp=4, ep=2, moe_tp=2)
CP2 = ParallelLayout(attn_dp=1, cp=2, ep=2)


def plan_of(
    layout: ParallelLayout, tokens, *, a2a: bool = False, extend: bool = True, **options
) -> SyncPlan:
    return sync_plan(layout, tokens, a2a=a2a, extend=extend, options=SyncOptions(**options))


def flow(plan: SyncPlan) -> tuple[Gather, Return, Reducer]:
    return plan.gather, plan.returning, plan.reducer


A2A, STANDARD = {"a2a": True}, {}
MAX_LEN, SUM_LEN = {"padding": Padding.MAX_LEN}, {"padding": Padding.SUM_LEN}
FLOWS = {
    "pure-tp": (TP4, STANDARD, (Gather.NONE, Return.NONE, Reducer.TAIL)),
    "one-rank": (
        ParallelLayout(attn_dp=1, ep=1),
        STANDARD,
        (Gather.NONE, Return.NONE, Reducer.TAIL),
    ),
    "dp-ep-sum": (
        DP2,
        SUM_LEN,
        (Gather.ALL_GATHER_V, Return.REDUCE_SCATTER_V, Reducer.GLUE_OUT),
    ),
    "dp-ep-max": (
        DP2,
        MAX_LEN,
        (Gather.ALL_GATHER, Return.REDUCE_SCATTER_V, Reducer.GLUE_OUT),
    ),
    "dp-tp-sum": (DP2_TP_MOE, SUM_LEN, (Gather.ALL_REDUCE, Return.DP_SCATTER, Reducer.TAIL)),
    "dp-tp-max": (DP2_TP_MOE, MAX_LEN, (Gather.ALL_GATHER, Return.DP_SCATTER, Reducer.TAIL)),
    "dp-tp-sum-gatherv": (
        DP2_TP_MOE,
        {**SUM_LEN, "gatherv": True},
        (Gather.ALL_GATHER_V, Return.REDUCE_SCATTER_V, Reducer.GLUE_OUT),
    ),
    "dp-tp-max-gatherv": (
        DP2_TP_MOE,
        {**MAX_LEN, "gatherv": True},
        (Gather.ALL_GATHER, Return.DP_SCATTER, Reducer.TAIL),
    ),
    "dp-tp-max-reduce-scatter": (
        DP2_TP_MOE,
        {**MAX_LEN, "reduce_scatter": True},
        (Gather.ALL_GATHER, Return.REDUCE_SCATTER, Reducer.GLUE_OUT),
    ),
    "dp-tp-sum-reduce-scatter": (
        DP2_TP_MOE,
        {**SUM_LEN, "reduce_scatter": True},
        (Gather.ALL_REDUCE, Return.DP_SCATTER, Reducer.TAIL),
    ),
    "dp-ep-max-reduce-scatter": (
        DP2,
        {**MAX_LEN, "reduce_scatter": True},
        (Gather.ALL_GATHER, Return.REDUCE_SCATTER_V, Reducer.GLUE_OUT),
    ),
    "dp-attn-tp-sum": (
        DP2_TP2,
        {**SUM_LEN, "gatherv": True},
        (Gather.ALL_REDUCE, Return.DP_SCATTER, Reducer.TAIL),
    ),
    "dp-attn-tp-max": (
        DP2_TP2,
        {**MAX_LEN, "reduce_scatter": True},
        (Gather.REDUCE_SCATTER_ALL_GATHER, Return.DP_SCATTER, Reducer.TAIL),
    ),
    "cp": (CP2, STANDARD, (Gather.ALL_GATHER, Return.REDUCE_SCATTER, Reducer.GLUE_OUT)),
    "a2a-dp": (DP2, A2A, (Gather.NONE, Return.NONE, Reducer.COMBINE)),
    "a2a-attn-tp": (
        ParallelLayout(attn_dp=1, attn_tp=2, ep=2),
        A2A,
        (Gather.TENSOR_SPLIT, Return.ALL_GATHER, Reducer.COMBINE),
    ),
    "a2a-dp-attn-tp": (
        DP2_TP2,
        A2A,
        (Gather.TENSOR_SPLIT, Return.ALL_GATHER, Reducer.COMBINE),
    ),
    "a2a-cp": (CP2, A2A, (Gather.NONE, Return.NONE, Reducer.COMBINE)),
    "a2a-cp-attn-tp": (
        ParallelLayout(attn_dp=1, cp=2, attn_tp=2, ep=4),
        A2A,
        (Gather.NONE, Return.NONE, Reducer.COMBINE),
    ),
}


@pytest.mark.parametrize(("layout", "chosen", "expected"), FLOWS.values(), ids=FLOWS)
def test_a_topology_has_one_flow(layout, chosen, expected):
    assert flow(plan_of(layout, [3] * layout.attn_dp, **chosen)) == expected


ROWS = {
    "pure-tp": (
        (TP4, [2], {}),
        ((0, 1),) * 4,
        ((0, 1),) * 4,
        (),
    ),
    "dp-sum": (
        (DP2, [2, 1], SUM_LEN),
        ((0, 1), (2,)),
        ((0, 1, 2),) * 2,
        (2, 1),
    ),
    "dp-max": (
        (DP2, [2, 1], MAX_LEN),
        ((0, 1), (2, -1)),
        ((0, 1, 2, -1),) * 2,
        (2, 2),
    ),
    "dp-sum-idle": (
        (DP2, [0, 2], SUM_LEN),
        ((), (0, 1)),
        ((0, 1),) * 2,
        (0, 2),
    ),
    "dp-max-idle": (
        (DP2, [0, 2], MAX_LEN),
        ((-1, -1), (0, 1)),
        ((-1, -1, 0, 1),) * 2,
        (2, 2),
    ),
    "dp-attn-tp-sum": (
        (DP2_TP2, [3, 1], SUM_LEN),
        ((0, 1, 2, -1), (0, 1, 2, -1), (3, -1), (3, -1)),
        ((0, 1, 2, -1, 3, -1),) * 4,
        (4, 2),
    ),
    "dp-attn-tp-max": (
        (DP2_TP2, [3, 1], MAX_LEN),
        ((0, 1, 2, -1), (0, 1, 2, -1), (3, -1, -1, -1), (3, -1, -1, -1)),
        ((0, 1, 2, -1, 3, -1, -1, -1),) * 4,
        (4, 4),
    ),
    "cp-zigzag": (
        (CP2, [5], {}),
        ((0, 1, 4), (2, 3, -1)),
        ((0, 1, 4, 2, 3, -1),) * 2,
        (3, 3),
    ),
    "cp-contiguous": (
        (CP2, [3], {"zigzag": False}),
        ((0, 1), (2, -1)),
        ((0, 1, 2, -1),) * 2,
        (2, 2),
    ),
    "a2a-cp-zigzag": (
        (CP2, [6], A2A),
        ((0, 1, 5), (2, 3, 4)),
        ((0, 1, 5), (2, 3, 4)),
        (),
    ),
    "a2a-cp-contiguous": (
        (CP2, [3], {**A2A, "zigzag": False}),
        ((0, 1), (2,)),
        ((0, 1), (2,)),
        (),
    ),
    "a2a-dp": (
        (DP2, [1, 2], A2A),
        ((0,), (1, 2)),
        ((0,), (1, 2)),
        (),
    ),
    "a2a-attn-tp-uneven": (
        (ParallelLayout(attn_dp=1, attn_tp=2, ep=2), [3], A2A),
        ((0, 1, 2), (0, 1, 2)),
        ((0, 1), (2,)),
        (),
    ),
    "a2a-attn-tp-empty-chunk": (
        (ParallelLayout(attn_dp=1, attn_tp=2, ep=2), [1], A2A),
        ((0,), (0,)),
        ((0,), ()),
        (),
    ),
    "a2a-dp-attn-tp": (
        (DP2_TP2, [3, 0], A2A),
        ((0, 1, 2, -1), (0, 1, 2, -1), (), ()),
        ((0, 1), (2, -1), (), ()),
        (),
    ),
}


@pytest.mark.parametrize(("case", "entry", "layer", "slots"), ROWS.values(), ids=ROWS)
def test_every_row_of_every_rank_is_where_upstream_puts_it(case, entry, layer, slots):
    layout, tokens, chosen = case
    plan = plan_of(layout, tokens, **chosen)
    assert (plan.entry, plan.layer, plan.slots) == (entry, layer, slots)


@pytest.mark.parametrize(
    ("tokens", "attn_tp", "extend", "force", "expected"),
    [
        ([4, 4], 1, True, False, Padding.SUM_LEN),
        ([4, 4], 1, False, False, Padding.MAX_LEN),
        ([8, 0, 0, 0], 1, False, False, Padding.SUM_LEN),
        ([8, 8, 0, 0], 1, False, False, Padding.MAX_LEN),
        ([8, 7, 0, 0], 1, False, False, Padding.SUM_LEN),
        ([8, 7, 0, 0], 2, False, False, Padding.MAX_LEN),
        ([0, 0], 1, False, False, Padding.MAX_LEN),
        ([8, 0, 0, 0], 1, True, True, Padding.MAX_LEN),
        ([5], 2, False, True, Padding.NONE),
    ],
    ids=[
        "extend",
        "decode",
        "one-busy",
        "half-filled",
        "under-half",
        "under-half-before-alignment",
        "idle",
        "forced",
        "one-group",
    ],
)
def test_padding_follows_phase_and_filling(tokens, attn_tp, extend, force, expected):
    dp = len(tokens)
    layout = ParallelLayout(attn_dp=dp, attn_tp=attn_tp, ep=dp * attn_tp)
    assert plan_of(layout, tokens, extend=extend, force_max_len=force).padding is expected


@pytest.mark.parametrize(
    ("layout", "a2a", "expected"),
    [(DP2, True, True), (DP2, False, False), (CP2, True, True), (CP2, False, False)],
    ids=["dp-a2a", "dp-gathered", "cp-a2a", "cp-gathered"],
)
def test_gathered_padding_is_routed_and_local_padding_is_not(layout, a2a, expected):
    assert plan_of(layout, [1] * layout.attn_dp, a2a=a2a).masks_padding is expected
