"""The golden quantisers of groups of 32, and fp4 as fp8, against hand-written values."""

import math

import pytest
import torch

from moe.golden import (
    decode_mxfp4,
    decode_mxfp8,
    fp4_as_fp8,
    quantize_mxfp4_weight,
    quantize_mxfp8_weight,
)

BOTH = pytest.mark.parametrize("quantize", [quantize_mxfp8_weight, quantize_mxfp4_weight])


def group(*values: float, columns: int = 32) -> torch.Tensor:
    """[1, columns] float64: the values, then zeros."""
    w = torch.zeros(1, columns, dtype=torch.float64)
    w[0, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return w


def bytes_of(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("quantize", "amax", "scale"),
    [
        (quantize_mxfp8_weight, 448.0, 1.0),
        (quantize_mxfp8_weight, 450.0, 2.0),
        (quantize_mxfp8_weight, 446.0, 1.0),
        (quantize_mxfp8_weight, 224.0, 0.5),
        (quantize_mxfp4_weight, 6.0, 1.0),
        (quantize_mxfp4_weight, 6.03125, 2.0),
        (quantize_mxfp4_weight, 5.96875, 1.0),
        (quantize_mxfp4_weight, 3.0, 0.5),
    ],
)
def test_the_scale_is_the_smallest_power_that_brings_a_group_into_range(quantize, amax, scale):
    assert quantize(group(-amax, 0.1)).scale.tolist() == [[scale]]


@BOTH
def test_a_group_of_zeros_has_the_smallest_scale(quantize):
    assert quantize(group()).scale.tolist() == [[2.0**-127]]


@BOTH
def test_the_smallest_scale_of_a_number_is_that_of_a_normal_float32(quantize):
    assert quantize(group(2.0**-140)).scale.tolist() == [[2.0**-126]]


@BOTH
def test_a_group_that_float32_divides_to_zero_has_codes_of_zero(quantize):
    got = quantize(group(2.0**-149))
    assert (got.scale.item(), got.codes.count_nonzero().item()) == (2.0**-127, 0)


def test_mxfp8_codes_are_rounded_to_e4m3():
    # Scale 2: 225 -> 224; 8.5 is a tie and goes to the even 8.
    got = quantize_mxfp8_weight(group(450.0, 17.0, -1.0))
    assert got.codes[0, :3].tolist() == [224.0, 8.0, -0.5]


def test_mxfp4_codes_are_rounded_to_e2m1():
    # Scale 2: 3.5 is a tie and goes to the even 4; -0.5 and 1.5 are codes.
    got = quantize_mxfp4_weight(group(7.0, -1.0, 3.0))
    assert got.codes[0, :3].tolist() == [4.0, -0.5, 1.5]


@BOTH
def test_every_32_columns_have_a_scale_of_their_own(quantize):
    w = torch.cat([group(3.5), group(7.0)], dim=1)
    first, second = quantize(w).scale[0].tolist()
    assert second == 2 * first


@BOTH
def test_columns_that_split_a_group_are_refused(quantize):
    with pytest.raises(ValueError, match="48 columns do not divide into groups of 32"):
        quantize(group(columns=48))


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_refused(quantize, value):
    with pytest.raises(ValueError, match="NaN and infinity"):
        quantize(group(value))


def test_an_mxfp8_weight_is_codes_times_their_group_scale():
    codes = torch.full((1, 64), 0x3C, dtype=torch.uint8)  # 1.5
    got = decode_mxfp8(codes, bytes_of(128, 124))
    assert got[0, [0, 31, 32, 63]].tolist() == [3.0, 3.0, 0.1875, 0.1875]


def test_an_mxfp4_weight_starts_with_the_low_half_of_a_byte():
    packed = torch.full((1, 32), 0xF1, dtype=torch.uint8)  # 0.5, then -6
    got = decode_mxfp4(packed, bytes_of(128, 126))
    assert got[0, [0, 1, 31, 32, 33]].tolist() == [1.0, -12.0, -12.0, 0.25, -3.0]


def test_a_byte_of_255_makes_its_group_nan():
    packed = torch.full((1, 32), 0x11, dtype=torch.uint8)
    assert decode_mxfp4(packed, bytes_of(255, 127)).isnan().sum().item() == 32


def one_value_a_group(code: int, *scale_bytes: int) -> tuple[torch.Tensor, torch.Tensor]:
    packed = torch.full((1, 16 * len(scale_bytes)), code * 0x11, dtype=torch.uint8)
    return packed, bytes_of(*scale_bytes)


def test_a_block_scale_is_its_largest_group_scale_over_64():
    got = fp4_as_fp8(*one_value_a_group(7, 120, 127, 125, 113))
    assert got.scale.tolist() == [[2.0**-6]]


def test_codes_hold_what_lies_2_to_the_14_under_the_largest_scale():
    got = fp4_as_fp8(*one_value_a_group(3, 127, 113))
    assert got.dequantized[0, [0, 32]].tolist() == [1.5, 1.5 * 2.0**-14]


def test_half_a_step_further_down_is_lost():
    # 0.5 * 2^-15 is half the smallest code of the block, 2^-9 * 2^-6.
    got = fp4_as_fp8(*one_value_a_group(1, 127, 112))
    assert got.dequantized[0, [0, 32]].tolist() == [0.5, 0.0]


def test_scaled_is_the_value_in_front_of_the_rounding():
    got = fp4_as_fp8(*one_value_a_group(1, 127, 112))
    assert got.scaled[0, [0, 32]].tolist() == [32.0, 2.0**-10]


def test_edge_blocks_have_scales_of_their_own():
    scale = torch.full((129, 5), 127, dtype=torch.uint8)
    scale[:128, 4], scale[128, :4], scale[128, 4] = 128, 129, 130
    got = fp4_as_fp8(torch.zeros(129, 80, dtype=torch.uint8), scale)
    assert got.scale.tolist() == [[2.0**-6, 2.0**-5], [2.0**-4, 2.0**-3]]


def test_a_cut_weight_keeps_its_shape_and_values():
    packed = torch.arange(129 * 80).remainder(256).to(torch.uint8).view(129, 80)
    scale = torch.arange(129 * 5).remainder(15).add(113).to(torch.uint8).view(129, 5)
    assert torch.equal(fp4_as_fp8(packed, scale).dequantized, decode_mxfp4(packed, scale))


def test_a_byte_of_255_makes_its_whole_block_nan():
    got = fp4_as_fp8(*one_value_a_group(1, 127, 255, 127, 127, 127))
    assert got.dequantized[0].isnan().tolist() == [True] * 128 + [False] * 32
