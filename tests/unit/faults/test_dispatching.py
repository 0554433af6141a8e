"""Faults of dispatch: each changes what it says, and nothing else of what was received."""

import pytest
import torch

from moe.faults.dispatching import (
    absent_route_is_num_experts,
    count_off_by_one,
    dropped_route_wraps,
    local_ids_left_global,
    received_rows_clipped,
    tokens_swapped,
)
from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from tests.unit.faults.values import context, kept, layer_weights, received


def seen(num_local=2, num_experts=8):
    return {Stage.WEIGHTS: layer_weights(num_local=num_local, num_experts=num_experts)}


@pytest.mark.parametrize(("row", "order"), [(0, [1, 0, 2]), (2, [2, 1, 0]), (4, [0, 2, 1])])
def test_two_neighbouring_tokens_change_places_with_their_scales(row, order):
    sent = received(scale=torch.tensor([[1.0], [2.0], [3.0]]))
    swapped = tokens_swapped(sent, context(row=row))
    assert torch.equal(swapped.hidden_states, sent.hidden_states[order])
    assert torch.equal(swapped.hidden_states_scale, sent.hidden_states_scale[order])
    assert swapped.topk_ids is sent.topk_ids


def test_packed_scales_stay_mn_major_when_tokens_change_places():
    packed = mn_major(torch.tensor([[1], [2], [3]], dtype=torch.int32))
    swapped = tokens_swapped(received(scale=packed), context(row=0)).hidden_states_scale
    assert (swapped.flatten().tolist(), swapped.stride()) == ([2, 1, 3], (1, 4))


def test_tokens_that_stayed_change_places_too():
    swapped = tokens_swapped(kept([[0], [1]], [[0], [1]]), context(row=0))
    assert swapped.hidden_states.tolist() == [[2.0, 3.0], [0.0, 1.0]]


@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_than_two_tokens_cannot_change_places(rows):
    sent = received(rows=rows)
    assert tokens_swapped(sent, context(row=0)) is sent


def test_ids_left_global_start_at_the_ranks_first_expert():
    sent = local_ids_left_global(received(), context(rank=3))
    assert sent.topk_ids.tolist() == [[6, -1], [7, 6], [-1, 7]]


def test_ids_left_global_are_the_slots_of_the_ranks_own_routes():
    sent = local_ids_left_global(kept([[5, 1], [-1, 4]], [[1, -1], [-1, 0]]), context())
    assert sent.topk_ids.tolist() == [[5, -1], [-1, 4]]


def test_absent_routes_are_marked_by_the_number_of_local_experts():
    sent = absent_route_is_num_experts(received(), context(seen(num_local=2)))
    assert sent.topk_ids.tolist() == [[0, 2], [1, 0], [2, 1]]


@pytest.mark.parametrize(
    ("physical", "local", "wrapped"),
    [
        ([[7, -1], [-1, 0]], [[1, -1], [-1, -1]], [[1, 1], [1, -1]]),
        ([[5, -1], [-1, 0]], [[1, -1], [-1, -1]], None),
        ([[7, 6], [1, 0]], [[1, 0], [-1, -1]], None),
        ([[1, -1], [-1, 0]], [[-1, -1], [-1, -1]], None),
    ],
    ids=["last rank", "another rank", "nothing dropped", "no own route"],
)
def test_dropped_routes_reach_the_last_expert_of_the_last_rank_alone(physical, local, wrapped):
    sent = kept(physical, local)
    got = dropped_route_wraps(sent, context(seen(num_local=2, num_experts=8)))
    assert got.topk_ids.tolist() == (local if wrapped is None else wrapped)


def test_dropped_routes_do_not_wrap_where_a_rank_has_all_experts():
    sent = kept([[1, -1]], [[1, -1]])
    assert dropped_route_wraps(sent, context(seen(num_local=2, num_experts=2))) is sent


@pytest.mark.parametrize(("expert", "counts"), [(0, [129, 128]), (1, [128, 129]), (2, [129, 128])])
def test_one_count_is_one_too_large(expert, counts):
    sent = received()
    wrong = count_off_by_one(sent, context(expert=expert))
    assert wrong.num_recv_tokens_per_expert.tolist() == counts
    assert sent.num_recv_tokens_per_expert.tolist() == [128, 128]


@pytest.mark.parametrize(
    ("limit", "ids"),
    [(1, [[0, -1], [-1, -1], [-1, -1]]), (3, [[0, -1], [1, 0], [-1, 1]])],
)
def test_rows_behind_the_limit_lose_their_routes(limit, ids):
    clipped = received_rows_clipped(received(), context(limit=limit))
    assert clipped.topk_ids.tolist() == ids
    assert clipped.topk_weights[limit:].sum() == 0


@pytest.mark.parametrize("fault", [count_off_by_one, received_rows_clipped, dropped_route_wraps])
def test_what_a_format_does_not_have_cannot_be_wrong(fault):
    sent = received() if fault is dropped_route_wraps else kept([[0]], [[0]])
    assert fault(sent, context(seen(), expert=0, limit=0)) is sent
