"""Rows are taken and replaced in any layout; memory layout and other rows stay."""

import pytest
import torch

from moe.faults.row_edits import live_places, received_places, rows_at, with_received, with_rows
from moe.quant.ue8m0 import mn_major
from tests.unit.faults.values import (
    expanded,
    gathered,
    in_slabs,
    kept,
    permuted,
    received,
    received_v2,
    slabs,
    written,
)


@pytest.mark.parametrize(
    ("sent", "places"),
    [
        (kept([[0], [1]], [[0], [1]]), [0, 1]),
        (received(), [0, 1, 2]),
        (received_v2(), [0, 1, 2]),
        (gathered(), [0, 1, 2]),
        (written((0, 2)), [2, 3]),
        (expanded((-1, 4, -1, 0)), [1, 3]),
        (slabs((2, 1)), [0, 1, 4]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_received_places_are_those_that_hold_something(sent, places):
    assert received_places(sent).tolist() == places


@pytest.mark.parametrize(
    ("rows", "places"), [(permuted().rows, [0, 2]), (in_slabs((1, 2)).rows, [0, 2, 3])]
)
def test_live_places_are_those_that_hold_a_route(rows, places):
    assert live_places(rows).tolist() == places


def matrix(dtype):
    return torch.arange(8.0).view(4, 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_rows_of_any_dtype_are_replaced_at_their_places(dtype):
    rows = matrix(dtype)
    wrong = with_rows(rows, torch.tensor([3, 0]), rows_at(rows, torch.tensor([1, 2])))
    assert wrong.dtype == dtype
    assert wrong.to(torch.float32).tolist() == [[4, 5], [2, 3], [4, 5], [2, 3]]
    assert rows.to(torch.float32).tolist() == matrix(torch.float32).tolist()


def test_a_place_counts_the_rows_of_all_slabs():
    rows = torch.arange(8.0).view(2, 2, 2)
    wrong = with_rows(rows, torch.tensor([2]), rows_at(rows, torch.tensor([1])))
    assert wrong.tolist() == [[[0, 1], [2, 3]], [[2, 3], [6, 7]]]


def test_entries_of_a_vector_are_rows_too():
    rows = torch.tensor([5, 6, 7])
    assert with_rows(rows, torch.tensor([1]), torch.tensor([9])).tolist() == [5, 9, 7]


@pytest.mark.parametrize("shape", [(3, 2), (2, 4, 2)], ids=str)
def test_packed_scales_stay_mn_major(shape):
    words = mn_major(torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape))
    wrong = with_rows(words, torch.tensor([0]), rows_at(words, torch.tensor([1])))
    assert wrong.stride() == words.stride()
    assert rows_at(wrong, torch.tensor([0])).tolist() == rows_at(words, torch.tensor([1])).tolist()


def test_received_rows_come_from_another_forward_with_their_scales():
    mixed = with_received(slabs(), torch.tensor([4]), slabs(first=100.0), torch.tensor([0]))
    assert mixed.hidden_states[1, 0].tolist() == [100.0, 101.0]
    assert mixed.hidden_states_scale[1, 0].tolist() == [100.0]
    assert torch.equal(mixed.hidden_states[0], slabs().hidden_states[0])
