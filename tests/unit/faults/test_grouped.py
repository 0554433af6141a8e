"""Faults on grouped rows: each changes what it says, in segments and in slabs."""

from dataclasses import replace

import pytest
import torch

from moe.faults.grouped import (
    empty_experts_closed_up,
    padding_row_counted,
    scale_rounded_down,
    slab_row_not_counted,
    topk_weights_missing,
    topk_weights_twice,
)
from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from moe.stages import (
    ActivationOutput,
    CombineInput,
    ExpandedRestore,
    Gemm2Output,
    PrePermuteOutput,
    SlabRestore,
)
from tests.unit.faults.values import context, expanded, in_slabs, kept, permuted, received, slabs


@pytest.mark.parametrize(("row", "ids"), [(0, [[0, 0], [1, -1]]), (1, [[0, -1], [1, 0]])])
@pytest.mark.parametrize("layout", [permuted, in_slabs])
def test_a_slot_without_a_route_reads_the_first_padding_row(layout, row, ids):
    restore = padding_row_counted(layout(), context(row=row)).restore
    assert restore.topk_ids.tolist() == ids
    assert restore.output_index[row].tolist() == [[0, 2][row], 1]


def test_without_a_free_slot_no_padding_row_can_be_counted():
    full = permuted()
    ids = torch.zeros_like(full.restore.topk_ids)
    full = replace(full, restore=replace(full.restore, topk_ids=ids))
    assert padding_row_counted(full, context(row=0)) is full


@pytest.mark.parametrize(
    ("segments", "closed_up"),
    [
        ((1, 1, 3, -1), [0, 0, 1, -1]),
        ((0, -1, 2, 2), [0, -1, 1, 1]),
        ((0, 1, 1, -1), [0, 1, 1, -1]),
        ((-1, -1, -1, -1), [-1, -1, -1, -1]),
    ],
    ids=["first empty", "middle empty", "none empty", "all empty"],
)
def test_experts_behind_an_empty_one_move_up(segments, closed_up):
    wrong = empty_experts_closed_up(permuted(segments), context())
    assert wrong.rows.m_indices.tolist() == closed_up


def test_slabs_have_a_place_of_their_own_for_every_expert():
    rows = in_slabs()
    assert empty_experts_closed_up(rows, context()) is rows


@pytest.mark.parametrize(
    ("expert", "masked_m"), [(0, [1, 0, 1]), (1, [2, 0, 0]), (2, [1, 0, 1])], ids=str
)
def test_a_slab_that_has_rows_loses_one(expert, masked_m):
    wrong = slab_row_not_counted(in_slabs((2, 0, 1)), context(expert=expert))
    assert wrong.rows.masked_m.tolist() == masked_m


@pytest.mark.parametrize("rows", [in_slabs((0, 0)), permuted()], ids=["empty slabs", "segments"])
def test_without_a_filled_slab_no_row_can_be_lost(rows):
    assert slab_row_not_counted(rows, context(expert=0)) is rows


def activated(scale):
    rows = torch.zeros(4, 1)
    return ActivationOutput(activation=rows, hidden_states=rows, hidden_states_scale=scale)


SEEN = {
    Stage.DISPATCH: received(),
    Stage.PRE_PERMUTE: permuted(),
    Stage.GEMM2: Gemm2Output(output=torch.tensor([[8.0]] * 4)),
}


@pytest.mark.parametrize(("row", "at"), [(0, 0), (1, 2), (2, 0)])
def test_an_fp32_scale_of_a_live_row_is_an_eighth_smaller(row, at):
    scale = torch.ones(4, 1)
    wrong = scale_rounded_down(activated(scale), context(SEEN, row=row)).hidden_states_scale
    assert wrong.flatten().tolist() == [0.875 if i == at else 1.0 for i in range(4)]
    assert scale.eq(1).all()


def test_packed_scales_of_a_live_row_are_halved_and_absent_groups_stay_zero():
    packed = mn_major(torch.full((4, 1), 127 | 130 << 8, dtype=torch.int32))
    wrong = scale_rounded_down(activated(packed), context(SEEN, row=1)).hidden_states_scale
    assert wrong.flatten().tolist() == [127 | 130 << 8] * 2 + [126 | 129 << 8, 127 | 130 << 8]
    assert wrong.stride() == (1, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=["fp32", "packed"])
def test_scales_of_one_slab_row_are_rounded_down(dtype):
    scale = torch.full((2, 2, 1), 128, dtype=dtype)
    scale = mn_major(scale) if dtype == torch.int32 else scale
    slabs = {Stage.PRE_PERMUTE: in_slabs()}
    wrong = scale_rounded_down(activated(scale), context(slabs, row=1)).hidden_states_scale
    assert (wrong != scale).flatten().tolist() == [False, False, True, False]


def test_without_scales_nothing_can_be_rounded_down():
    middle = activated(None)
    assert scale_rounded_down(middle, context(SEEN, row=0)) is middle


def test_weights_folded_twice_are_squared():
    partials = topk_weights_twice(CombineInput(partial=torch.zeros(2, 1)), context(SEEN)).partial
    assert partials.flatten().tolist() == [8 * 0.25, 8 * 0.0625]


def test_weights_never_folded_count_as_one():
    partials = topk_weights_missing(CombineInput(partial=torch.zeros(2, 1)), context(SEEN)).partial
    assert partials.flatten().tolist() == [8.0, 8.0]


def test_weights_folded_into_rows_of_routes_twice_multiply_each_row_again():
    sent = expanded()
    weights = torch.tensor([0.5, 0.25, 0.75, 0.5])
    way_back = ExpandedRestore(psum=sent.psum, topk_weights=weights)
    there = {
        Stage.DISPATCH: sent,
        Stage.PRE_PERMUTE: PrePermuteOutput(rows=permuted().rows, restore=way_back),
    }
    rows = CombineInput(partial=torch.tensor([[4.0], [8.0], [4.0], [4.0]], dtype=torch.bfloat16))
    twice = topk_weights_twice(rows, context(there)).partial
    assert twice.flatten().tolist() == [2.0, 2.0, 4.0, 2.0]  # the third row is padding


def test_weights_that_combine_applies_are_not_folded_twice():
    partials = CombineInput(partial=torch.zeros(2, 1), pending_weights=torch.ones(1, 1))
    way_back = SlabRestore(topk_weights=torch.ones(1, 1))
    rows = PrePermuteOutput(rows=in_slabs().rows, restore=way_back)
    there = {Stage.DISPATCH: slabs(), Stage.PRE_PERMUTE: rows}
    assert topk_weights_twice(partials, context(there)) is partials


def test_weights_that_are_folded_with_the_factor_stay():
    partials = CombineInput(partial=torch.zeros(2, 1))
    stayed = {**SEEN, Stage.DISPATCH: kept([[0]], [[0]])}
    assert topk_weights_twice(partials, context(stayed)) is partials
