"""Dispatch of the low-latency mode over a loopback world, against plain loops over routes."""

import pytest
import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.quant.fp8 import LOW_LATENCY_AMAX_FLOOR, group_scales, quantize_groups
from tests.unit.moe.low_latency_worlds import (
    ALL_TO_ONE,
    CAPACITY,
    MANY,
    WORLDS,
    due,
    hidden_of,
    places,
    sent,
)
from topology.loopback import RankError

EVERY_WORLD = pytest.mark.parametrize("routes", WORLDS.values(), ids=WORLDS)


@EVERY_WORLD
def test_every_route_is_one_message_to_the_rank_of_its_slot(routes):
    for rank, output in enumerate(sent(routes)):
        arrived = [(expert, *source) for (expert, _), source in places(output).items()]
        assert sorted(arrived) == due(routes, rank)


@EVERY_WORLD
def test_the_handle_names_the_row_that_arrived(routes):
    for output in sent(routes):
        for place, (source, row) in places(output).items():
            assert float(output.hidden_states[*place, 0]) == 16 * source + row


@EVERY_WORLD
def test_chunks_fill_a_slab_from_its_first_row_on(routes):
    for output in sent(routes):
        rows = [sorted(row for e, row in places(output) if e == expert) for expert in (0, 1)]
        assert rows == [list(range(count)) for count in output.masked_m.tolist()]


@EVERY_WORLD
def test_what_lies_past_the_count_is_poison(routes):
    for output in sent(routes):
        for expert, count in enumerate(output.masked_m.tolist()):
            assert bool(output.hidden_states[expert, count:].isnan().all())
            assert (output.handle.source_row[expert, count:] == 2**31 - 1).all()


def test_slabs_have_room_for_what_all_ranks_may_send():
    assert {output.hidden_states.shape for output in sent()} == {(2, 4 * CAPACITY, 4)}


def test_a_slab_can_be_filled_by_all_ranks():
    assert sent(ALL_TO_ONE)[1].masked_m.tolist() == [0, 16]


def test_counts_of_sources_and_slabs_are_int32():
    output = sent()[0]
    assert output.handle.count.tolist() == [[2, 0, 1, 1], [1, 0, 0, 1]]
    assert output.masked_m.tolist() == [4, 2]
    tensors = (output.masked_m, output.handle.begin, output.handle.count, output.handle.source_row)
    assert {tensor.dtype for tensor in tensors} == {torch.int32}


def test_two_experts_of_one_rank_take_two_messages():
    assert sent([[[2, 3, -1]], [], [], []])[1].masked_m.tolist() == [1, 1]


def test_dropped_routes_are_sent_nowhere():
    outputs = sent([[[-1, -1, -1]] * 3, [[-1, -1, -1]], [], []])
    assert [output.masked_m.tolist() for output in outputs] == [[0, 0]] * 4


def test_weights_stay_at_home():
    assert sent()[2].topk_weights.tolist() == [[1.0] * 3] * 2


@pytest.mark.parametrize(("rank", "expected"), [(0, 7), (1, 1), (2, 4), (3, 2)])
def test_the_hint_counts_four_ranks_that_route_as_this_one(rank, expected):
    # 4, 0, 2 and 1 rows of 3 slots over 8 experts: (rows * 4 * 3 + 8) // 8.
    assert sent()[rank].expected_m == expected


@pytest.mark.parametrize("wire", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_codes_and_scales_are_those_of_the_row_at_its_source(wire):
    outputs = sent(MANY, width=640, wire=wire)
    rows = [
        quantize_groups(hidden_of(rank, 4, 640), wire, amax_floor=LOW_LATENCY_AMAX_FLOOR)
        for rank in range(4)
    ]
    for output in outputs:
        codes, scale = output.hidden_states.view(torch.uint8), output.hidden_states_scale
        for (expert, at), (source, row) in places(output).items():
            assert torch.equal(codes[expert, at], rows[source].values.view(torch.uint8)[row])
            want = group_scales(rows[source].scale, 5)[row]
            assert torch.equal(group_scales(scale[expert, at : at + 1], 5)[0], want)


def small(rank: int, num_tokens: int, width: int) -> Tensor:
    """Groups whose largest magnitude is under the wire's floor."""
    return torch.full((num_tokens, width), 2.0**-17, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("wire", "code"),
    # 2^-17 * 448 / 1e-4 = 34.2; 1e-4 / 448 is rounded up to 2^-22, and 2^-17 / 2^-22 = 32.
    [(ScaleFormat.FP32, 36.0), (ScaleFormat.UE8M0, 32.0)],
)
def test_groups_are_scaled_for_at_least_the_floor_of_the_wire(wire, code):
    output = sent([[[0, 1, 2]], [], [], []], hidden=small, width=128, wire=wire)[0]
    assert output.hidden_states[0, 0].to(torch.float32).tolist() == [code] * 128


@pytest.mark.parametrize(("wire", "width"), [(ScaleFormat.FP32, 5), (ScaleFormat.UE8M0, 2)])
def test_scales_lie_along_the_rows_of_a_slab(wire, width):
    scale = sent(width=640, wire=wire)[2].hidden_states_scale
    assert (scale.shape, scale.stride()) == ((2, 16, width), (16 * width, 1, 16))


def test_scales_past_the_count_are_poison():
    output = sent(width=128, wire=ScaleFormat.FP32)[1]
    for expert, count in enumerate(output.masked_m.tolist()):
        assert bool(output.hidden_states_scale[expert, count:].isnan().all())


def test_more_rows_than_a_rank_may_send_are_refused_with_the_limit_and_its_field():
    message = r"5 rows .* may send 4; moe\.switches\.max_dispatch_tokens_per_rank raises that"
    with pytest.raises(RankError, match=message):
        sent([[[0, 1, 2]] * 5, [], [], []])


def test_slabs_that_scales_cannot_lie_along_are_refused_with_the_field():
    with pytest.raises(RankError, match=r"2 ranks of 1 rows .*max_dispatch_tokens_per_rank"):
        sent([[], []], capacity=1)


def test_sources_and_their_rows_arrive_in_an_order_that_the_seed_decides():
    first, second, again = (
        [places(output) for output in sent(MANY, seed=seed)] for seed in (1, 2, 1)
    )
    assert first == again
    assert first != second


@pytest.mark.parametrize("what", ["sources", "rows of a source"])
def test_every_order_of_arrival_is_drawn_some_time(what):
    seen = set()
    for seed in range(40):
        found = places(sent([[[0, -1, -1]] * 2, [[0, -1, -1]], [], []], seed=seed)[0])
        order = tuple(found[0, row] for row in range(3))
        rows = tuple(row for source, row in order if source == 0)
        seen.add(rows if what == "rows of a source" else order[0][0])
    assert len(seen) == 2
