"""Index arithmetic against plain Python loops."""

import pytest
import torch

from moe.indices import (
    align,
    align_counts,
    ceil_div,
    exclusive_psum,
    m_indices_from_counts,
    rank_within_value,
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
