"""Scales are found in the wrong place: each fault says whose scale stands where."""

import pytest
import torch

from moe.faults.scale_layouts import (
    dispatch_scale_stride_pad,
    scale_col_coarse,
    scale_of_first_block,
    scale_of_next_block,
    scale_of_next_row,
    scales_in_wrong_layout,
    split_scale_not_padded,
)
from moe.quant.ue8m0 import mn_major
from moe.weights import ExpertMatrix
from tests.unit.faults.scaled_values import (
    activated,
    bytes_of,
    packed_weights,
    quantised_slabs,
    seen,
    weights_of,
    words,
)
from tests.unit.faults.values import context, in_slabs, permuted, received

UNWRITTEN = 2**31 - 1


def test_eight_rows_share_the_scale_of_the_first():
    weights = packed_weights(*[(100 + row,) for row in range(10)])
    coarse = scale_col_coarse(weights, context()).experts.w13.scale
    assert [row[0] for row in bytes_of(coarse)[0]] == [100] * 8 + [108] * 2


@pytest.mark.parametrize(
    "weights",
    [
        packed_weights((100,), (101,), group_size=128),
        weights_of(ExpertMatrix(values=torch.zeros(1, 2, 1), scale=torch.ones(1, 1, 1))),
        weights_of(ExpertMatrix(values=torch.zeros(1, 2, 1), scale=None)),
    ],
    ids=["blocks", "fp32", "bf16"],
)
def test_scales_that_rows_share_in_any_case_stay(weights):
    assert scale_col_coarse(weights, context()) is weights


def experts(scale):
    return weights_of(ExpertMatrix(values=torch.zeros(3, 1, 1), scale=scale), num_local=3)


def test_rows_of_two_exponents_are_found_two_bytes_apart():
    sent = received(scale=words((1, 2), (3, 4), (5, 6)))
    wrong = dispatch_scale_stride_pad(sent, context()).hidden_states_scale
    assert bytes_of(wrong) == [[1, 2, 0, 0], [0, 0, 0, 0], [3, 4, 0, 0]]


def test_rows_of_whole_words_are_found_where_they_are():
    sent = received(scale=words((1, 2, 3, 4), (5, 6, 7, 8), (9, 10, 11, 12)))
    wrong = dispatch_scale_stride_pad(sent, context()).hidden_states_scale
    assert bytes_of(wrong) == bytes_of(sent.hidden_states_scale)


@pytest.mark.parametrize("scale", [None, torch.ones(3, 1)], ids=["bf16", "fp32"])
def test_scales_without_padding_have_one_stride(scale):
    sent = received(scale=scale)
    assert dispatch_scale_stride_pad(sent, context()) is sent


TWO_COLUMNS = torch.tensor([[1, 2], [3, 4], [5, 6], [7, 8]], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32], ids=str)
def test_columns_that_follow_each_other_are_read_as_rows(dtype):
    """Memory holds 1 3 5 7 2 4 6 8, two of which are taken for a row; rows 0 and 2 are live."""
    middle = activated(mn_major(TWO_COLUMNS.to(dtype)))
    wrong = scales_in_wrong_layout(middle, context(seen())).hidden_states_scale
    assert wrong.tolist() == [[1, 3], [3, 4], [2, 4], [7, 8]]
    assert wrong.stride() == (1, 4)


def test_each_slab_is_read_in_the_wrong_layout():
    scale = mn_major(torch.stack([TWO_COLUMNS, TWO_COLUMNS + 8]))
    wrong = scales_in_wrong_layout(quantised_slabs(scale), context()).rows.hidden_states_scale
    assert wrong[0].tolist() == [[1, 3], [5, 7], [5, 6], [7, 8]]
    assert wrong[1].tolist() == [[9, 11], [11, 12], [13, 14], [15, 16]]


@pytest.mark.parametrize("scale", [None, torch.ones(4, 2)], ids=["none", "row-major"])
def test_scales_that_lie_row_by_row_are_read_so(scale):
    rows = permuted(scale=scale)
    assert scales_in_wrong_layout(rows, context()) is rows


def test_scales_behind_a_split_point_come_too_early():
    """Rows 0, 2 and 3 are live, so three scales stand end to end; a fourth is looked for."""
    scale = torch.tensor([[10], [11], [12], [13]], dtype=torch.int32)
    segments = permuted((0, 0, 1, 1), (0, 2, 3), scale=mn_major(scale))
    wrong = split_scale_not_padded(segments, context()).rows.hidden_states_scale
    assert wrong.flatten().tolist() == [10, 11, 13, UNWRITTEN]


def test_segments_without_padding_lose_nothing():
    segments = permuted((0, 0, 1, 1), (0, 1, 2, 3), scale=torch.arange(4.0)[:, None])
    wrong = split_scale_not_padded(segments, context()).rows.hidden_states_scale
    assert wrong.flatten().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("rows", [permuted(), in_slabs()], ids=["bf16", "slabs"])
def test_where_no_scales_are_split_none_are_shifted(rows):
    assert split_scale_not_padded(rows, context()) is rows


@pytest.mark.parametrize(
    ("row", "at", "rotated"), [(0, 0, [2, 3, 1, 0]), (1, 2, [8, 9, 7, 0]), (2, 0, [2, 3, 1, 0])]
)
def test_groups_of_one_row_have_the_scales_of_their_right_neighbours(row, at, rotated):
    middle = activated(words((1, 2, 3), (4, 5, 6), (7, 8, 9), (10, 11, 12)))
    wrong = scale_of_next_block(middle, context(seen(), row=row)).hidden_states_scale
    due = bytes_of(middle.hidden_states_scale)
    assert bytes_of(wrong) == [rotated if i == at else due[i] for i in range(4)]


def test_fp32_scales_move_one_group_as_well():
    middle = activated(torch.tensor([[1.0, 2.0]] * 4))
    wrong = scale_of_next_block(middle, context(seen(), row=1)).hidden_states_scale
    assert wrong.tolist() == [[1, 2], [1, 2], [2, 1], [1, 2]]


def test_all_groups_of_live_rows_have_the_first_ones_scale():
    middle = activated(torch.tensor([[1.0, 2.0]] * 4))
    wrong = scale_of_first_block(middle, context(seen())).hidden_states_scale
    assert wrong.tolist() == [[1, 1], [1, 2], [1, 1], [1, 2]]


@pytest.mark.parametrize(("row", "scales"), [(0, [3, 2, 3, 4]), (1, [1, 2, 1, 4])])
def test_one_live_row_has_the_scales_of_the_next(row, scales):
    middle = activated(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
    wrong = scale_of_next_row(middle, context(seen(), row=row)).hidden_states_scale
    assert wrong.flatten().tolist() == scales
    assert middle.hidden_states_scale.flatten().tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "fault", [scale_of_next_block, scale_of_next_row], ids=lambda fault: fault.__name__
)
def test_rows_without_scales_take_no_others(fault):
    middle = activated(None)
    assert fault(middle, context(seen(), row=0)) is middle
