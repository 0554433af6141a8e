"""Index arithmetic against plain Python loops."""

from itertools import product

import pytest
import torch

from moe.indices import (
    align,
    align_counts,
    arrival_numbers,
    capped_slab_height,
    ceil_div,
    compact_row_bound,
    exclusive_psum,
    local_ids,
    m_indices_from_counts,
    pad_expert_counts,
    rank_within_value,
    slab_height,
    slab_rows,
    wide_row_bound,
)

COUNTS = [[3, 0, 2], [0, 0], [5], [128, 1, 0, 127]]


@pytest.mark.parametrize(
    ("count", "expected"), [(0, 0), (1, 1), (127, 1), (128, 1), (129, 2), (256, 2)]
)
def test_a_count_takes_as_many_pieces_as_hold_it(count, expected):
    assert ceil_div(count, 128) == expected


@pytest.mark.parametrize(("count", "expected"), [(0, 0), (1, 4), (4, 4), (5, 8)])
def test_aligning_rounds_up(count, expected):
    assert align(count, 4) == expected


def test_counts_are_aligned_one_by_one():
    counts = torch.tensor([0, 1, 127, 128, 129, 256])
    assert align_counts(counts, 128).tolist() == [0, 128, 128, 128, 256, 256]


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_a_segment_starts_where_the_ones_before_it_end(counts):
    expected = [sum(counts[:i]) for i in range(len(counts))]
    assert exclusive_psum(torch.tensor(counts)).tolist() == expected


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_every_row_of_a_segment_carries_its_expert(counts):
    expected = [expert for expert, count in enumerate(counts) for _ in range(count)]
    assert m_indices_from_counts(torch.tensor(counts)).tolist() == expected


def test_the_experts_of_rows_are_int32():
    assert m_indices_from_counts(torch.tensor([1, 2])).dtype == torch.int32


@pytest.mark.parametrize("values", [[], [0], [2, 0, 2, 2, 0], [5] * 4, [9, 3, 3, 0, 9, 3]], ids=str)
def test_an_arrival_number_counts_the_equal_values_before(values):
    expected = [values[:i].count(value) for i, value in enumerate(values)]
    assert rank_within_value(torch.tensor(values, dtype=torch.int64)).tolist() == expected


@pytest.mark.parametrize(
    ("num_routes", "num_local_experts", "expected"),
    [
        (14, 2, 256),
        (10, 512, 1280),
        (20, 512, 2560),
        (320, 512, 40960),
        (640, 512, 65664),
        (1280, 512, 66304),
        (0, 8, 0),
        (1, 8, 128),
    ],
)
def test_the_row_bound_is_upstreams(num_routes, num_local_experts, expected):
    assert compact_row_bound(num_routes, num_local_experts, 128) == expected


@pytest.mark.parametrize("num_routes", range(8))
def test_the_row_bound_is_reached_by_the_worst_routing_and_by_none_exceeded(num_routes):
    num_experts, alignment = 3, 4
    rows = [
        sum(-(-routing.count(expert) // alignment) * alignment for expert in range(num_experts))
        for routing in product(range(num_experts), repeat=num_routes)
    ]
    assert compact_row_bound(num_routes, num_experts, alignment) == max(rows)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([5, 1], [128, 128]),
        ([0, 6], [0, 256]),
        ([6, 0], [128, 128]),
        ([0, 0], [0, 256]),
        ([129, 0], [256, 0]),
    ],
    ids=str,
)
def test_the_last_expert_takes_up_the_slack(counts, expected):
    assert pad_expert_counts(torch.tensor(counts), 128, 256).tolist() == expected


def test_the_counts_to_pad_stay_as_they_are():
    counts = torch.tensor([1, 2])
    pad_expert_counts(counts, 128, 256)
    assert counts.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(0, 256), (1, 256), (255, 256), (256, 512), (600, 768)]
)
def test_a_slab_has_room_for_more_rows_than_there_are_tokens(num_tokens, expected):
    assert slab_height(num_tokens) == expected


@pytest.mark.parametrize(
    ("num_tokens", "fullest", "expected"),
    [
        (600, 0, 256),
        (600, 256, 256),
        (600, 257, 512),
        (600, 600, 768),
        (0, 0, 256),
        (256, 256, 256),
    ],
)
def test_a_capped_slab_holds_the_fullest_expert_in_steps_of_256(num_tokens, fullest, expected):
    assert capped_slab_height(num_tokens, fullest) == expected


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_ids_are_counted_from_a_ranks_first_slot(dtype):
    ids = torch.tensor([[0, 3, 4], [5, 6, -1]], dtype=dtype)
    local = local_ids(ids, 3, 3)
    assert (local.tolist(), local.dtype) == ([[-1, 0, 1], [2, -1, -1]], dtype)


@pytest.mark.parametrize("first", range(3))
def test_a_dropped_route_is_no_slot_of_any_rank(first):
    assert local_ids(torch.tensor([-1]), first, 4).tolist() == [-1]


@pytest.mark.parametrize(
    ("routes", "experts", "expected"), [(0, 2, 256), (1, 2, 384), (128, 3, 512), (6600, 8, 7680)]
)
def test_the_wide_bound_is_the_routes_and_a_block_an_expert(routes, experts, expected):
    assert wide_row_bound(routes, experts, 128) == expected
    assert compact_row_bound(routes, experts, 128) <= expected


@pytest.mark.parametrize(
    ("masked_m", "expected"),
    [([2, 0, 3], [0, 1, 8, 9, 10]), ([0, 0], []), ([4, 1], [0, 1, 2, 3, 4])],
    ids=str,
)
def test_the_real_rows_of_slabs_come_first_in_each(masked_m, expected):
    assert slab_rows(torch.tensor(masked_m, dtype=torch.int32), 4).tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_arrival_numbers_count_each_value_in_a_drawn_order(seed):
    values = torch.tensor([3, 0, 3, 3, 1, 0, 3])
    arrival = arrival_numbers(values, seed)
    assert sorted(arrival[values == 3].tolist()) == [0, 1, 2, 3]
    assert sorted(arrival[values == 0].tolist()) == [0, 1]
    assert arrival[values == 1].tolist() == [0]


def test_arrival_numbers_of_two_seeds_differ():
    values = torch.zeros(64, dtype=torch.int64)
    assert not torch.equal(arrival_numbers(values, 0), arrival_numbers(values, 1))


def test_no_value_has_no_arrival_number():
    assert arrival_numbers(torch.zeros(0, dtype=torch.int64), 0).shape == (0,)
