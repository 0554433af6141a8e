"""What a scenario may ask of the glue, and what upstream does not define."""

import pytest

from topology.layout import ParallelLayout
from topology.sync import (
    Padding,
    Reducer,
    Return,
    SyncError,
    SyncOptions,
    SyncPlan,
    sync_plan,
)

DP2 = ParallelLayout(attn_dp=2, ep=2)
DP2_TP_MOE = ParallelLayout(attn_dp=2, ep=1, moe_tp=2)
DP2_TP2 = ParallelLayout(attn_dp=2, attn_tp=2, ep=4)
TP4 = ParallelLayout(attn_dp=1, attn_tp=4, ep=2, moe_tp=2)
CP2 = ParallelLayout(attn_dp=1, cp=2, ep=2)
A2A = {"a2a": True}
MAX_LEN, SUM_LEN = {"padding": Padding.MAX_LEN}, {"padding": Padding.SUM_LEN}


def plan_of(layout: ParallelLayout, tokens, *, a2a: bool = False, **options) -> SyncPlan:
    return sync_plan(layout, tokens, a2a=a2a, extend=True, options=SyncOptions(**options))


ASKED = {
    "all_reduce": (TP4, {}, Return.NONE),
    "dp_scatter": (DP2, {}, Return.DP_SCATTER),
    "reduce_scatter": (DP2, MAX_LEN, Return.REDUCE_SCATTER),
    "reduce_scatter_v": (DP2_TP_MOE, SUM_LEN, Return.REDUCE_SCATTER_V),
}


@pytest.mark.parametrize("reduce", ASKED)
def test_a_return_may_be_asked_for_where_the_groups_allow_it(reduce):
    layout, chosen, expected = ASKED[reduce]
    plan = plan_of(layout, [3] * layout.attn_dp, reduce=reduce, **chosen)
    assert plan.returning is expected


def test_reduce_scatter_of_equal_slots_is_what_context_parallelism_does_anyway():
    assert plan_of(CP2, [3], reduce="reduce_scatter") == plan_of(CP2, [3])


def test_asking_for_the_variable_return_is_asking_for_the_variable_gather():
    asked = plan_of(DP2_TP_MOE, [3, 1], reduce="reduce_scatter_v")
    assert asked == plan_of(DP2_TP_MOE, [3, 1], gatherv=True)


def test_asking_for_dp_scatter_leaves_the_reduction_to_the_tail():
    assert plan_of(DP2, [3, 1], reduce="dp_scatter").reducer is Reducer.TAIL


REFUSED = {
    "cp-with-dp": (
        (ParallelLayout(attn_dp=2, cp=2, ep=4), [1, 1], {}),
        r"cp\(2\) without an all-to-all needs attention dp = tp = 1, has dp\(2\) tp\(1\)",
    ),
    "cp-with-tp": (
        (ParallelLayout(attn_dp=1, cp=2, attn_tp=2, ep=4), [1], {}),
        r"cp\(2\) .* has dp\(1\) tp\(2\)",
    ),
    "a2a-split-experts": (
        (DP2_TP_MOE, [1, 1], A2A),
        "moves tokens to whole experts: moe_tp is 2",
    ),
    "a2a-reduces": (
        (DP2, [1, 1], {**A2A, "reduce": "all_reduce"}),
        "reduce all_reduce: combine adds",
    ),
    "tp-scatters": ((TP4, [1], {"reduce": "dp_scatter"}), "dp_scatter: every rank keeps every row"),
    "cp-all-reduces": ((CP2, [1], {"reduce": "all_reduce"}), "scatters equal slots"),
    "dp-all-reduces": ((DP2, [1, 1], {"reduce": "all_reduce"}), "return by dp_scatter"),
    "equal-of-unequal": (
        (DP2, [1, 1], {**SUM_LEN, "reduce": "reduce_scatter"}),
        r"reduce_scatter \(max_len\)",
    ),
    "variable-of-equal": (
        (DP2_TP_MOE, [1, 1], {**MAX_LEN, "reduce": "reduce_scatter_v"}),
        r"reduce_scatter_v \(sum_len, or as many EP ranks\)",
    ),
    "equal-over-attn-tp": (
        (DP2_TP2, [1, 1], {**MAX_LEN, "reduce": "reduce_scatter"}),
        "with one rank a DP group",
    ),
    "padding-of-one-group": ((TP4, [1], SUM_LEN), "between attention-DP groups, dp is 1"),
    "no-padding-of-groups": (
        (DP2, [1, 1], {"padding": Padding.NONE}),
        "padding none: .* dp is 2",
    ),
    "forced-and-sum": (
        (DP2, [1, 1], {**SUM_LEN, "force_max_len": True}),
        "padding sum_len: the dispatcher pads every slot to the longest",
    ),
}


@pytest.mark.parametrize(("case", "message"), REFUSED.values(), ids=REFUSED)
def test_what_upstream_does_not_define_is_refused_with_the_rule(case, message):
    layout, tokens, chosen = case
    with pytest.raises(SyncError, match=message):
        plan_of(layout, tokens, **chosen)


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [1, -1]], ids=["few", "many", "negative"])
def test_counts_that_are_not_one_a_group_are_refused(tokens):
    with pytest.raises(ValueError, match="need 2 counts of at least 0, got"):
        plan_of(DP2, tokens)
