"""Canonical coordinates and moves of rows, whatever their dtype."""

import pytest
import torch

from reports.verdict.rows import Rows, cat_rows, distinct, take_rows

DTYPES = [torch.bfloat16, torch.float32, torch.int32, torch.float8_e4m3fn, torch.float8_e8m0fnu]


def values(dtype, *rows):
    return torch.tensor(rows).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_any_dtype_are_taken_by_index(dtype):
    taken = take_rows(values(dtype, [1.0], [2.0], [4.0]), torch.tensor([2, 0, 2]))
    assert taken.dtype == dtype
    assert taken.float().tolist() == [[4.0], [1.0], [4.0]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_one_dtype_keep_it_when_they_are_joined(dtype):
    joined = cat_rows([values(dtype, [1.0]), values(dtype, [2.0], [4.0])])
    assert joined.dtype == dtype
    assert joined.float().tolist() == [[1.0], [2.0], [4.0]]


def test_rows_of_several_dtypes_become_float64():
    joined = cat_rows([values(torch.float8_e4m3fn, [0.5]), values(torch.bfloat16, [3.0])])
    assert (joined.dtype, joined.tolist()) == (torch.float64, [[0.5], [3.0]])


def test_distinct_lists_each_entry_once_ascending():
    assert distinct(torch.tensor([3, 0, 3, 1])) == [0, 1, 3]
    assert distinct(torch.zeros(0, dtype=torch.int64)) == []


def test_rows_of_a_rank_have_no_coordinate_that_was_not_given():
    rows = Rows.of_rank(2, 3)
    assert rows.rank.tolist() == [2, 2, 2]
    assert {tuple(c.tolist()) for c in (rows.token, rows.slot, rows.expert)} == {(-1, -1, -1)}


def test_joined_rows_keep_the_order_of_their_parts():
    rows = Rows.cat([Rows.of_rank(1, 1), Rows.of_rank(0, 2, torch.tensor([7, 8]))])
    assert len(rows) == 3
    assert (rows.rank.tolist(), rows.token.tolist()) == ([1, 0, 0], [-1, 7, 8])


def test_an_index_picks_all_coordinates_of_a_row():
    rows = Rows(
        rank=torch.tensor([0, 1]),
        token=torch.tensor([2, 3]),
        slot=torch.tensor([4, 5]),
        expert=torch.tensor([6, 7]),
    )
    picked = rows[torch.tensor([False, True])]
    assert [c.tolist() for c in (picked.rank, picked.token, picked.slot, picked.expert)] == [
        [1],
        [3],
        [5],
        [7],
    ]
