"""Small bf16 matrices in every checkpoint form, codes and scales by hand."""

import pytest
import torch

from moe.recipes import WeightFormat
from scenarios.weight_forms import checkpoint_form


def bf16(*rows):
    """[1, N, 32] bf16, every row of one value."""
    return torch.tensor([[[row] * 32 for row in rows]], dtype=torch.bfloat16)


def test_bf16_stays_as_it_is():
    matrix = bf16(1.0, -2.0)
    form = checkpoint_form(matrix, WeightFormat.BF16)
    assert torch.equal(form.values, matrix)
    assert form.scale is None


def test_blocks_have_an_fp32_scale_of_their_largest_value():
    form = checkpoint_form(bf16(7.0, -3.5), WeightFormat.FP8_BLOCK128)
    assert form.values.float().tolist() == [[[448.0] * 32, [-224.0] * 32]]
    assert (form.scale.dtype, form.scale.tolist()) == (torch.float32, [[[0.015625]]])


def test_gate_and_up_have_a_scale_each():
    form = checkpoint_form(bf16(7.0, 3.5, 14.0, -7.0), WeightFormat.FP8_PER_TENSOR, parts=2)
    assert form.scale.tolist() == [[0.015625, 0.03125]]
    assert form.values.float()[0, :, 0].tolist() == [448.0, 224.0, 448.0, -224.0]


def test_every_expert_has_scales_of_its_own():
    experts = torch.cat([bf16(7.0, 7.0), bf16(28.0, 14.0)])
    form = checkpoint_form(experts, WeightFormat.FP8_PER_TENSOR)
    assert form.scale.tolist() == [[0.015625], [0.0625]]


def test_a_scale_of_a_matrix_is_its_largest_value_over_448():
    form = checkpoint_form(bf16(1.0, 0.5), WeightFormat.FP8_PER_TENSOR)
    assert form.scale.item() == torch.tensor(1 / 448, dtype=torch.float32).item()


def test_a_power_of_two_scale_is_rounded_up():
    form = checkpoint_form(bf16(8.0), WeightFormat.FP8_PER_TENSOR, power_of_two_scales=True)
    assert form.scale.item() == 0.03125
    assert form.values.float().unique().tolist() == [256.0]


def test_a_scale_that_is_a_power_of_two_already_stays():
    form = checkpoint_form(bf16(7.0), WeightFormat.FP8_PER_TENSOR, power_of_two_scales=True)
    assert form.scale.item() == 0.015625


@pytest.mark.parametrize("form", [WeightFormat.FP8_BLOCK128, WeightFormat.FP8_PER_TENSOR])
def test_a_matrix_of_zeros_has_the_scale_of_the_floor(form):
    zeros = checkpoint_form(bf16(0.0), form)
    assert zeros.scale.item() == (torch.tensor(1e-4) / 448).item()
    assert zeros.values.float().unique().tolist() == [0.0]


def test_mxfp8_has_a_byte_for_32_columns():
    matrix = torch.cat([bf16(448.0), bf16(-1.75)], dim=-1)
    form = checkpoint_form(matrix, WeightFormat.MXFP8)
    assert (form.scale.dtype, form.scale.tolist()) == (torch.uint8, [[[127, 119]]])
    assert form.values.float().tolist() == [[[448.0] * 32 + [-448.0] * 32]]
    assert form.group_size == 32


def test_mxfp4_has_two_codes_and_32_columns_a_byte():
    matrix = torch.tensor([[[6.0, -0.5] * 16 + [12.0, 2.0] * 16]], dtype=torch.bfloat16)
    form = checkpoint_form(matrix, WeightFormat.MXFP4)
    assert form.scale.tolist() == [[[127, 128]]]
    assert form.values.tolist() == [[[0x97] * 16 + [0x27] * 16]]
    assert (form.in_features, form.group_size) == (64, 32)


@pytest.mark.parametrize("form", [WeightFormat.MXFP8, WeightFormat.MXFP4])
def test_columns_that_do_not_split_into_groups_are_refused(form):
    with pytest.raises(ValueError, match="33 columns"):
        checkpoint_form(torch.ones(1, 2, 33, dtype=torch.bfloat16), form)
