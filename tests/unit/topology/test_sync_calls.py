"""The calls that a plan makes due, written out for each kind of flow."""

import pytest

from topology.layout import ParallelLayout
from topology.sync import Padding, SyncOptions, sync_plan
from topology.sync_calls import Carried, collective_calls

PAIR, FOUR = (0, 1), (0, 1, 2, 3)
DP2 = ParallelLayout(attn_dp=2, ep=2)
DP2_TP2 = ParallelLayout(attn_dp=2, attn_tp=2, ep=4)
MAX_LEN = {"padding": Padding.MAX_LEN}


def calls_of(layout, tokens, rank, *, a2a=False, input_ids=False, fp8_wire=False, **options):
    plan = sync_plan(layout, tokens, a2a=a2a, extend=True, options=SyncOptions(**options))
    due = collective_calls(plan, layout, rank, input_ids=input_ids, fp8_wire=fp8_wire)
    return [(call.stage, call.op, call.group, call.rows) for call in due]


CASES = {
    "pure-tp": (
        (ParallelLayout(attn_dp=1, attn_tp=2, ep=2), [3], 1, {}),
        [("tail", "all_reduce", PAIR, 3)],
    ),
    "dp-ep": (
        (DP2, [2, 1], 1, {}),
        [("glue_in", "all_gather_v", PAIR, 1), ("glue_out", "reduce_scatter_v", PAIR, 3)],
    ),
    "dp-idle": (
        (DP2, [2, 0], 1, {}),
        [("glue_in", "all_gather_v", PAIR, 0), ("glue_out", "reduce_scatter_v", PAIR, 2)],
    ),
    "dp-attn-tp-sum": (
        (DP2_TP2, [3, 1], 2, {}),
        [("glue_in", "all_reduce", FOUR, 6), ("tail", "all_reduce", FOUR, 6)],
    ),
    "dp-attn-tp-max": (
        (DP2_TP2, [3, 1], 2, MAX_LEN),
        [
            ("glue_in", "reduce_scatter_v", (2, 3), 4),
            ("glue_in", "all_gather_v", FOUR, 2),
            ("tail", "all_reduce", FOUR, 8),
        ],
    ),
    "cp": (
        (ParallelLayout(attn_dp=1, cp=2, ep=2), [3], 0, {}),
        [("glue_in", "all_gather_v", PAIR, 2), ("glue_out", "reduce_scatter_v", PAIR, 4)],
    ),
    "a2a-attn-tp": (
        (DP2_TP2, [3, 1], 1, {"a2a": True}),
        [("glue_out", "all_gather_v", PAIR, 2)],
    ),
    "a2a-dp": ((DP2, [3, 1], 1, {"a2a": True}), []),
}


@pytest.mark.parametrize(("case", "expected"), CASES.values(), ids=CASES)
def test_the_due_calls_follow_from_the_plan(case, expected):
    layout, tokens, rank, chosen = case
    assert calls_of(layout, tokens, rank, **chosen) == expected


def test_the_ids_of_a_hash_layer_travel_as_its_rows_do():
    calls = calls_of(DP2_TP2, [3, 1], 0, input_ids=True, **MAX_LEN)
    assert calls[:2] == calls[2:4]


def carried(gatherv: bool) -> list[Carried]:
    layout = ParallelLayout(attn_dp=2, ep=1, moe_tp=2)
    options = SyncOptions(gatherv=gatherv)
    plan = sync_plan(layout, [1, 1], a2a=False, extend=True, options=options)
    calls = collective_calls(plan, layout, 0, input_ids=True, fp8_wire=True)
    return [call.carries for call in calls if call.stage == "glue_in"]


def test_a_quantised_gather_sends_codes_and_scales_before_the_ids():
    assert carried(gatherv=True) == [Carried.WIRE, Carried.WIRE_SCALE, Carried.INPUT_IDS]


def test_another_gather_is_not_quantised():
    assert carried(gatherv=False) == [Carried.HIDDEN_STATES, Carried.INPUT_IDS]
