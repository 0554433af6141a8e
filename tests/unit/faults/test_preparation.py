"""Faults of prepared weights and of padded experts."""

from dataclasses import replace

import pytest
import torch

from moe.faults.bits import same_values
from moe.faults.preparation import (
    gate_up_interleave_mismatch,
    packed_scale_sent_raw_expected,
    padded_columns_filled,
    padded_rows_loaded,
    stale_scale_after_reload,
)
from moe.formats import Stage
from moe.quant.ue8m0 import mn_major
from moe.stages import GlueInOutput
from moe.weights import ExpertMatrix, ExpertWeights
from tests.unit.faults.values import context, layer_weights, received

E4M3 = torch.float8_e4m3fn


def packed(*rows):
    """[1, N, W] int32 in the GEMM's layout."""
    return mn_major(torch.tensor([rows], dtype=torch.int32))


def holding(matrix, w2=None):
    return replace(layer_weights(), experts=ExpertWeights(w13=matrix, w2=w2 or matrix))


def fp8(scale, num_slots=1, rows=4):
    return ExpertMatrix(values=torch.zeros(num_slots, rows, 8).to(E4M3), scale=scale)


def test_packed_words_are_packed_again_as_if_they_were_fp32():
    """Bits 23 to 30 of a word: its highest byte without the sign, and a bit of the next one."""
    matrix = fp8(packed([0x7E7F7F7F, 0x01800000], [0x00000000, 0x40000000]), rows=2)
    experts = packed_scale_sent_raw_expected(holding(matrix), context()).experts
    for wrong in (experts.w13.scale, experts.w2.scale):
        assert wrong.tolist() == [[[0x03FC, 0], [0x8000, 0]]]
        assert wrong.stride() == matrix.scale.stride()


@pytest.mark.parametrize("scale", [None, torch.ones(1, 1, 1)], ids=["bf16", "fp32 blocks"])
def test_scales_that_are_not_packed_cannot_be_packed_twice(scale):
    weights = holding(fp8(scale))
    assert same_values(packed_scale_sent_raw_expected(weights, context()), weights)


def test_rows_of_halves_are_read_as_if_they_took_turns():
    w13 = ExpertMatrix(values=torch.tensor([[[1.0], [2.0], [3.0], [4.0]]]), scale=None)
    experts = gate_up_interleave_mismatch(holding(w13), context()).experts
    assert experts.w13.values.flatten().tolist() == [1.0, 3.0, 2.0, 4.0]
    assert experts.w2 is w13


@pytest.mark.parametrize(
    ("scale", "words"),
    [(packed([1], [2], [3], [4]), [1, 3, 2, 4]), (torch.tensor([[[1.0], [2.0]]]), [1, 2])],
    ids=["of rows", "of blocks"],
)
def test_scales_of_rows_go_with_them_and_those_of_blocks_stay(scale, words):
    wrong = gate_up_interleave_mismatch(holding(fp8(scale)), context()).experts.w13
    assert wrong.scale.flatten().tolist() == words
    assert wrong.scale.stride() == scale.stride()


def test_an_interleaved_matrix_keeps_its_group_size():
    w13 = replace(fp8(packed([1], [2], [3], [4])), group_size=32)
    assert gate_up_interleave_mismatch(holding(w13), context()).experts.w13.group_size == 32


@pytest.mark.parametrize(("expert", "scales"), [(0, [5, 5]), (1, [4, 4]), (2, [5, 5])])
def test_one_expert_has_the_scales_of_the_next_slot(expert, scales):
    scale = torch.tensor([4.0, 5.0]).view(2, 1, 1)
    weights = holding(fp8(scale, num_slots=2))
    experts = stale_scale_after_reload(weights, context(expert=expert)).experts
    assert experts.w13.scale.flatten().tolist() == scales
    assert experts.w2.scale.flatten().tolist() == scales


def test_stale_packed_scales_keep_their_layout():
    scale = mn_major(torch.arange(10, dtype=torch.int32).view(2, 5, 1))
    weights = holding(fp8(scale, num_slots=2, rows=5))
    wrong = stale_scale_after_reload(weights, context(expert=0)).experts.w13.scale
    assert (wrong[0].flatten().tolist(), wrong.stride()) == ([5, 6, 7, 8, 9], scale.stride())


@pytest.mark.parametrize("scale", [None, torch.ones(1, 1, 1)], ids=["no scales", "one slot"])
def test_scales_without_a_next_slot_are_not_stale(scale):
    weights = holding(fp8(scale))
    assert same_values(stale_scale_after_reload(weights, context(expert=0)), weights)


def test_rows_of_padding_hold_the_next_slots_first_rows():
    values = torch.tensor([[[1, 2], [0, 0], [3, 4]], [[5, 6], [0, 0], [7, 8]]], dtype=torch.uint8)
    scale = mn_major(torch.tensor([[[1], [0], [2]], [[3], [0], [4]]], dtype=torch.int32))
    matrix = ExpertMatrix(values=values, scale=scale, group_size=32)
    wrong = padded_rows_loaded(holding(matrix), context()).experts.w2
    assert wrong.values[:, 1].tolist() == [[5, 6], [1, 2]]
    assert wrong.scale[:, :, 0].tolist() == [[1, 3, 2], [3, 1, 4]]
    assert (wrong.group_size, wrong.scale.stride()) == (32, scale.stride())


def test_scales_of_blocks_cover_rows_of_padding_as_they_are():
    values = torch.tensor([[[448.0], [0.0]], [[-2.0], [0.0]]]).to(E4M3)
    scale = torch.tensor([[[0.5]], [[0.25]]])
    wrong = padded_rows_loaded(holding(ExpertMatrix(values=values, scale=scale)), context())
    assert wrong.experts.w13.values.to(torch.float32)[:, 1, 0].tolist() == [-2.0, 448.0]
    assert wrong.experts.w13.scale is scale


def test_experts_without_padding_have_no_rows_to_fill():
    values = torch.tensor([[[1.0], [0.0]], [[0.0], [2.0]]])
    weights = holding(ExpertMatrix(values=values, scale=None))
    assert same_values(padded_rows_loaded(weights, context()), weights)


def of_width(num_columns):
    rows = torch.zeros(3, num_columns)
    return {Stage.GLUE_IN: GlueInOutput(own=rows, hidden_states=rows)}


@pytest.mark.parametrize(
    ("dtype", "number"), [(torch.bfloat16, 9984.0), (E4M3, 448.0)], ids=["bf16", "codes"]
)
def test_columns_of_padding_hold_a_number(dtype, number):
    sent = received()
    sent = replace(sent, hidden_states=sent.hidden_states.to(dtype))
    wrong = padded_columns_filled(sent, context(of_width(1), value=10000.0)).hidden_states
    assert wrong.dtype == dtype
    assert wrong.to(torch.float32).tolist() == [[0.0, number], [2.0, number], [4.0, number]]


def test_rows_without_padding_have_no_columns_to_fill():
    sent = received()
    assert padded_columns_filled(sent, context(of_width(2), value=10000.0)) is sent
