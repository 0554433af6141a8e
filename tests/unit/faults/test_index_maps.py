"""Faults of the map to grouped rows: each changes what it says, and only there."""

from dataclasses import replace

import pytest
import torch

from moe.faults.index_maps import (
    output_index_divided_twice,
    padding_expert_id_flipped,
    row_index_wraps,
    scale_index_wraps,
    segment_spilled,
)
from moe.stages import SlabRestore
from tests.unit.faults.values import context, in_slabs, permuted


def with_index(output, index):
    return replace(output, restore=replace(output.restore, output_index=torch.tensor(index)))


def test_numbers_of_grouped_rows_are_divided_by_the_slots_of_a_token():
    rows = with_index(permuted(), [[5, -1], [4, 3]])
    wrong = output_index_divided_twice(rows, context()).restore.output_index
    assert wrong.tolist() == [[2, -1], [2, 1]]


@pytest.mark.parametrize(
    ("m_indices", "live", "flipped"),
    [
        ((0, 0, 1, 1), (0, 2), [0, -1, 1, -1]),
        ((0, -1, 1, -1), (0, 2), [0, 0, 1, 1]),
        ((2, -1, -1, -1), (0,), [2, 2, 2, 2]),
        ((0, 1), (0, 1), [0, 1]),
    ],
    ids=["announced", "counted", "tail", "no padding"],
)
def test_padding_has_the_other_mark(m_indices, live, flipped):
    wrong = padding_expert_id_flipped(permuted(m_indices, live), context())
    assert wrong.rows.m_indices.tolist() == flipped


def test_the_last_row_of_a_full_segment_lies_in_the_next():
    scale = torch.arange(4.0)[:, None]
    full = with_index(permuted(live=(0, 1, 2), scale=scale), [[0, -1], [1, 2]])
    wrong = segment_spilled(full, context())
    assert wrong.rows.hidden_states.flatten().tolist() == [0, 1, 1, 3]
    assert wrong.rows.hidden_states_scale.flatten().tolist() == [0, 1, 1, 3]
    assert wrong.restore.output_index.tolist() == [[0, -1], [2, 2]]


@pytest.mark.parametrize(
    ("m_indices", "live"),
    [((0, 0, 1, 1), (0, 2)), ((0, 0, -1, 1), (0, 1, 3)), ((0, 0, 0, 0), (0, 1, 2, 3))],
    ids=["padding behind", "gap", "last segment"],
)
def test_a_segment_with_room_spills_nothing(m_indices, live):
    rows = permuted(m_indices, live)
    assert segment_spilled(rows, context()) is rows


def test_rows_from_the_bound_on_are_those_at_the_start():
    rows = permuted((0, 0, 1, 1), (0, 1, 2, 3))
    wrong = row_index_wraps(rows, context(bound=3)).rows
    assert wrong.hidden_states.flatten().tolist() == [0, 1, 2, 0]


def test_padding_does_not_wrap():
    wrong = row_index_wraps(permuted(), context(bound=1)).rows
    assert wrong.hidden_states.flatten().tolist() == [0, 1, 0, 3]


def test_scales_from_the_bound_on_are_those_at_the_start_and_rows_stay():
    rows = permuted(live=(0, 1, 2, 3), scale=torch.arange(4.0)[:, None])
    wrong = scale_index_wraps(rows, context(bound=2)).rows
    assert wrong.hidden_states_scale.flatten().tolist() == [0, 1, 0, 1]
    assert wrong.hidden_states is rows.rows.hidden_states


@pytest.mark.parametrize(
    "fault", [output_index_divided_twice, padding_expert_id_flipped, segment_spilled]
)
def test_slabs_that_go_back_as_they_came_have_no_such_map(fault):
    rows = replace(in_slabs(), restore=SlabRestore(topk_weights=torch.ones(1, 1)))
    assert fault(rows, context()) is rows


def test_without_scales_none_can_wrap():
    rows = permuted()
    assert scale_index_wraps(rows, context(bound=1)) is rows
