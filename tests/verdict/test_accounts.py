"""Routes, rows, collectives and bytes that do not add up are named."""

from dataclasses import replace

import pytest

from moe.formats import Stage
from topology.collectives import CollectiveCall


def accounts(clean, traces=None, calls=None):
    found = clean.judged(traces, calls).deviations
    return [one for one in found if one.check == "accounts"]


def test_a_route_without_a_grouped_row_is_not_computed(clean):
    rank, route = clean.last_rank, clean.route(clean.last_rank)
    index = clean.tensor(Stage.PRE_PERMUTE, rank, "restore.output_index").clone()
    index[route.received, route.slot] = -1
    traces = clean.changed(Stage.PRE_PERMUTE, rank, {"restore.output_index": index})
    first = accounts(clean, traces)[0]
    assert (first.stage, first.rank, first.tensor) == (Stage.PRE_PERMUTE, rank, "routes")
    assert first.expert == route.expert
    assert first.got == first.want - 1


def test_a_grouped_row_with_two_sources_is_found(clean):
    rank = clean.last_rank
    routes = [clean.route(rank, index) for index in (0, 1)]
    index = clean.tensor(Stage.PRE_PERMUTE, rank, "restore.output_index").clone()
    index[routes[1].received, routes[1].slot] = routes[0].row
    traces = clean.changed(Stage.PRE_PERMUTE, rank, {"restore.output_index": index})
    first = accounts(clean, traces)[0]
    assert (first.stage, first.rank) == (Stage.PRE_PERMUTE, rank)
    assert first.tensor == "restore.output_index"
    assert f"row {routes[0].row} " in first.detail


def test_a_route_that_is_dropped_on_the_wire_was_not_received(clean):
    rank, route = clean.last_rank, clean.route(clean.last_rank)
    ids = clean.tensor(Stage.DISPATCH, rank, "topk_ids").clone()
    ids[route.received, route.slot] = -1
    first = accounts(clean, clean.changed(Stage.DISPATCH, rank, {"topk_ids": ids}))[0]
    assert (first.stage, first.rank, first.expert) == (Stage.DISPATCH, rank, route.expert)
    assert "received" in first.detail


def test_a_token_that_arrives_twice_is_named(clean):
    rank = clean.last_rank
    name = "handle.source_row"
    rows, ranks = (clean.tensor(Stage.DISPATCH, rank, n) for n in (name, "handle.source_rank"))
    one, other = (ranks == ranks.mode().values).nonzero()[:2, 0].tolist()
    wrong = {clean.received_token(rank, one): 2.0, clean.received_token(rank, other): 0.0}
    doubled = rows.clone()
    doubled[other] = rows[one]
    found = accounts(clean, clean.changed(Stage.DISPATCH, rank, {name: doubled}))
    first = next(one for one in found if one.tensor == name)
    assert (first.stage, first.rank, first.rows) == (Stage.DISPATCH, rank, 2)
    assert first.got == wrong[first.token]


def test_a_route_handed_to_post_permute_twice_is_found(clean):
    rank = clean.last_rank
    ids = clean.tensor(Stage.PRE_PERMUTE, rank, "restore.topk_ids").clone()
    ids[tuple((ids < 0).nonzero()[0])] = 0
    found = accounts(clean, clean.changed(Stage.PRE_PERMUTE, rank, {"restore.topk_ids": ids}))
    assert [(one.stage, one.rank) for one in found] == [(Stage.PRE_PERMUTE, rank)]
    assert found[0].got == found[0].want + 1


@pytest.mark.parametrize("stage", [Stage.DISPATCH, Stage.COMBINE])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_collective_is_blamed_on_its_rank_and_stage(clean_ue8m0, stage, rank):
    calls = [list(made) for made in clean_ue8m0.calls]
    calls[rank] = [call for call in calls[rank] if call.stage != stage]
    found = [one for one in accounts(clean_ue8m0, calls=calls) if one.tensor == "collectives"]
    assert [(one.stage, one.rank) for one in found] == [(stage, rank)]


def test_collectives_in_another_order_are_found(clean):
    calls = [list(made) for made in clean.calls]
    calls[1] = [*calls[1][:-2], calls[1][-1], calls[1][-2]]
    assert any(one.tensor == "collectives" for one in accounts(clean, calls=calls))


@pytest.mark.parametrize("stage", [Stage.DISPATCH, Stage.COMBINE])
def test_payload_of_another_size_is_found(clean, stage):
    calls = [list(made) for made in clean.calls]
    rank = clean.last_rank
    at = max(i for i, call in enumerate(calls[rank]) if call.stage == stage)
    calls[rank][at] = replace(calls[rank][at], payload_bytes=calls[rank][at].payload_bytes + 2)
    found = accounts(clean, calls=calls)
    assert [(one.stage, one.rank, one.tensor) for one in found] == [(stage, rank, "payload")]
    assert found[0].got == found[0].want + 2


def test_two_calls_of_a_stage_with_each_others_sizes_are_found(clean):
    rank = clean.last_rank
    made = list(clean.calls[rank])
    one, two = (i for i, call in enumerate(made) if call.stage == Stage.DISPATCH)
    sizes = made[one].payload_bytes, made[two].payload_bytes
    assert sizes[0] != sizes[1]
    made[one] = replace(made[one], payload_bytes=sizes[1])
    made[two] = replace(made[two], payload_bytes=sizes[0])
    calls = [*clean.calls[:rank], made, *clean.calls[rank + 1 :]]
    (found,) = accounts(clean, calls=calls)
    assert (found.stage, found.rank, found.tensor) == (Stage.DISPATCH, rank, "payload")
    assert (found.got, found.want) == (sizes[1], sizes[0])


def test_bytes_on_the_wire_are_the_rows_that_routes_call_for(clean_ue8m0):
    """Row: 256 codes, 2 scales in one word, 6 ids of 8 bytes, 6 weights of 4, a row of 8."""
    ids = clean_ue8m0.tensor(Stage.ROUTE, 0, "topk_ids")
    messages = sum(len({int(e) // 2 for e in row}) for row in ids)
    counts = 4 * (1 + 2) * 8
    sent = [call.payload_bytes for call in clean_ue8m0.calls[0] if call.stage == Stage.DISPATCH]
    assert sent == [counts, messages * (256 + 4 + 6 * 8 + 6 * 4 + 8)]


@pytest.mark.parametrize("stage", [Stage.GLUE_IN, Stage.TAIL])
def test_a_collective_that_every_rank_makes_for_nothing_is_found(clean, stage):
    group = clean.resolved.judged.layout.ep_group(0)
    extra = CollectiveCall(stage=stage, op="all_gather_v", group=group, payload_bytes=1 << 20)
    calls = [
        sorted([*made, extra], key=lambda call: Stage(call.stage).position) for made in clean.calls
    ]
    found = [one for one in accounts(clean, calls=calls) if one.tensor == "collectives"]
    assert {(one.stage, one.rank) for one in found} == {(stage, rank) for rank in group}
