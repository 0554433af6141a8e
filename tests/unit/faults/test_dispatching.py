"""Faults of dispatch: each changes what it says, and nothing else of what was received."""

from dataclasses import replace

import pytest
import torch

from moe.faults.dispatching import (
    absent_route_is_num_experts,
    count_off_by_one,
    dropped_route_wraps,
    local_ids_left_global,
    no_upper_bound_on_local_id,
    psum_as_aligned_ends,
    received_rows_clipped,
    slab_counts_wrap,
    tokens_swapped,
    weights_sent_in_bf16,
)
from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from tests.unit.faults.values import (
    context,
    expanded,
    gathered,
    kept,
    layer_weights,
    received,
    received_v2,
    slabs,
    written,
)


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


@pytest.mark.parametrize(
    ("sent", "moved"),
    [
        (slabs((1, 1)), [4, 1, 2, 3, 0, 5, 6, 7]),
        (expanded((1, -1, -1, 0)), [3, 1, 2, 0]),
        (written((1, 1)), [2, 1, 0, 3]),
    ],
    ids=["low latency", "expanded", "flashinfer"],
)
def test_rows_that_hold_nothing_stay_when_others_change_places(sent, moved):
    swapped = tokens_swapped(sent, context(row=0))
    rows = sent.hidden_states.view(-1, 2)
    assert torch.equal(swapped.hidden_states.view(-1, 2), rows[moved])


def test_scales_of_slabs_change_places_with_their_rows():
    scale = tokens_swapped(slabs((1, 1)), context(row=0)).hidden_states_scale
    assert scale.flatten().tolist() == [4, 1, 2, 3, 0, 5, 6, 7]


@pytest.mark.parametrize("rows", [0, 1])
def test_fewer_than_two_tokens_cannot_change_places(rows):
    sent = received(rows=rows)
    assert tokens_swapped(sent, context(row=0)) is sent


@pytest.mark.parametrize(
    "sent", [received(), received_v2(), gathered()], ids=lambda v: type(v).__name__
)
def test_ids_left_global_start_at_the_ranks_first_expert(sent):
    sent = local_ids_left_global(sent, context(seen(), rank=3))
    assert sent.topk_ids.tolist() == [[6, -1], [7, 6], [-1, 7]]


def test_ids_left_global_are_the_slots_of_the_ranks_own_routes():
    sent = local_ids_left_global(kept([[5, 1], [-1, 4]], [[1, -1], [-1, 0]]), context())
    assert sent.topk_ids.tolist() == [[5, -1], [-1, 4]]


@pytest.mark.parametrize(
    ("physical", "local", "taken"),
    [
        ([[2, 5], [0, 3], [-1, 7]], [[0, -1], [-1, 1], [-1, -1]], [[0, 1], [-1, 1], [-1, 1]]),
        ([[6, 7], [0, 5]], [[0, 1], [-1, -1]], [[0, 1], [-1, -1]]),
        ([[5, 0], [-1, 6]], [[-1, -1], [-1, -1]], [[-1, -1], [-1, -1]]),
    ],
    ids=["experts behind", "last rank", "no own route"],
)
def test_ids_behind_the_last_local_expert_are_taken_modulo_their_number(physical, local, taken):
    sent = no_upper_bound_on_local_id(kept(physical, local), context(seen()))
    assert sent.topk_ids.tolist() == taken


def test_absent_routes_are_marked_by_the_number_of_local_experts():
    sent = absent_route_is_num_experts(received(), context(seen(num_local=2)))
    assert sent.topk_ids.tolist() == [[0, 2], [1, 0], [2, 1]]


def test_absent_routes_that_stay_global_are_marked_by_the_number_of_all_experts():
    sent = absent_route_is_num_experts(written(), context(seen(num_local=2), num_ranks=4))
    assert sent.topk_ids.tolist() == [[5, 2], [8, 8], [3, 4], [2, 6]]


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
    got = dropped_route_wraps(sent, context(seen(num_local=2), num_slots=8))
    assert got.topk_ids.tolist() == (local if wrapped is None else wrapped)


def test_dropped_routes_do_not_wrap_where_a_rank_has_all_experts():
    sent = kept([[1, -1]], [[1, -1]])
    assert dropped_route_wraps(sent, context(seen(num_local=2), num_slots=2)) is sent


@pytest.mark.parametrize(("expert", "counts"), [(0, [129, 128]), (1, [128, 129]), (2, [129, 128])])
def test_one_count_is_one_too_large(expert, counts):
    sent = received()
    wrong = count_off_by_one(sent, context(seen(), expert=expert))
    assert wrong.num_recv_tokens_per_expert.tolist() == counts
    assert sent.num_recv_tokens_per_expert.tolist() == [128, 128]


@pytest.mark.parametrize(
    ("sent", "name", "counts"),
    [
        (received_v2(), "psum", [129, 257]),
        (expanded(), "psum", [3, 129]),
        (slabs(), "masked_m", [3, 1]),
    ],
    ids=["v2", "expanded", "low latency"],
)
def test_one_count_is_one_too_large_however_a_format_counts(sent, name, counts):
    wrong = count_off_by_one(sent, context(seen(), expert=0))
    assert getattr(wrong, name).tolist() == counts


@pytest.mark.parametrize(
    ("sent", "psum"), [(received_v2(), [2, 130]), (expanded(), [128, 256])], ids=["v2", "expanded"]
)
def test_ends_of_segments_are_in_the_other_convention(sent, psum):
    wrong = psum_as_aligned_ends(sent, context()).psum
    assert (wrong.tolist(), wrong.dtype) == (psum, torch.int32)


@pytest.mark.parametrize(
    ("limit", "ids"),
    [(1, [[0, -1], [-1, -1], [-1, -1]]), (3, [[0, -1], [1, 0], [-1, 1]])],
)
def test_rows_behind_the_limit_lose_their_routes(limit, ids):
    clipped = received_rows_clipped(received(), context(limit=limit))
    assert clipped.topk_ids.tolist() == ids
    assert clipped.topk_weights[limit:].sum() == 0


def test_rows_behind_the_limit_are_counted_where_rows_hold_something():
    clipped = received_rows_clipped(written(), context(limit=1))
    assert clipped.topk_ids.tolist() == [[5, 2], [-1, -1], [-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    "fault",
    [
        local_ids_left_global,
        no_upper_bound_on_local_id,
        absent_route_is_num_experts,
        received_rows_clipped,
        dropped_route_wraps,
    ],
)
@pytest.mark.parametrize("sent", [slabs(), expanded()], ids=["low latency", "expanded"])
def test_rows_of_routes_have_no_ids_that_could_be_wrong(fault, sent):
    assert fault(sent, context(seen(), limit=0)) is sent


@pytest.mark.parametrize(
    "fault", [count_off_by_one, received_rows_clipped, psum_as_aligned_ends, dropped_route_wraps]
)
def test_what_a_format_does_not_have_cannot_be_wrong(fault):
    sent = received() if fault is dropped_route_wraps else kept([[0]], [[0]])
    assert fault(sent, context(seen(), expert=0, limit=0)) is sent


@pytest.mark.parametrize(("bound", "counts"), [(2, [0, 1]), (1, [0, 0]), (8, [2, 1])])
def test_counts_of_slabs_start_again_at_the_bound(bound, counts):
    wrong = slab_counts_wrap(slabs(), context(bound=bound))
    assert wrong.masked_m.tolist() == counts


def test_what_has_no_slabs_counts_none():
    sent = received()
    assert slab_counts_wrap(sent, context(bound=1)) is sent


def test_weights_that_travel_are_rounded_to_eight_bits():
    sent = received()
    third = replace(sent, topk_weights=torch.full((3, 2), 1 / 3))
    assert weights_sent_in_bf16(third, context()).topk_weights.unique().tolist() == [0.333984375]


@pytest.mark.parametrize("sent", [slabs(), kept([[0]], [[0]])], ids=["low latency", "standard"])
def test_weights_that_stay_are_not_rounded(sent):
    assert weights_sent_in_bf16(sent, context()) is sent
