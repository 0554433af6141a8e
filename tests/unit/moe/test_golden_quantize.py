"""The golden quantisers against hand-written codes and scales."""

import math

import pytest
import torch

from moe.formats import ScaleFormat
from moe.golden import quantize_blocks, quantize_groups, requantize_weight

FP32, UE8M0 = ScaleFormat.FP32, ScaleFormat.UE8M0


def row(*values: float, columns: int = 128) -> torch.Tensor:
    """[1, columns] float64: the values, then zeros."""
    x = torch.zeros(1, columns, dtype=torch.float64)
    x[0, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return x


@pytest.mark.parametrize("exponent", [-20, -1, 0, 5])
def test_an_exact_power_of_two_is_its_own_ue8m0_scale(exponent):
    assert quantize_groups(row(448 * 2.0**exponent), UE8M0).scale.tolist() == [[2.0**exponent]]


@pytest.mark.parametrize(
    "amax", [450.0, math.nextafter(448.0, math.inf)], ids=["next_bf16", "next_float64"]
)
def test_just_above_a_power_of_two_the_ue8m0_scale_doubles(amax):
    assert quantize_groups(row(amax), UE8M0).scale.tolist() == [[2.0]]


@pytest.mark.parametrize(
    "amax", [446.0, math.nextafter(448.0, 0.0)], ids=["previous_bf16", "previous_float64"]
)
def test_just_below_a_power_of_two_the_ue8m0_scale_stays(amax):
    assert quantize_groups(row(amax), UE8M0).scale.tolist() == [[1.0]]


def test_ue8m0_codes_are_the_values_over_the_scale():
    # Scale 2: 450 -> 225 -> 224; 3 -> 1.5; 17 -> 8.5 is a tie and goes to the even 8; -1 -> -0.5.
    got = quantize_groups(row(450.0, 3.0, 17.0, -1.0), UE8M0)
    assert got.codes[0, :4].tolist() == [224.0, 1.5, 8.0, -0.5]


def test_scaled_is_the_value_in_front_of_the_rounding():
    got = quantize_groups(row(450.0, 3.0, 17.0, -1.0), UE8M0)
    assert got.scaled[0, :4].tolist() == [225.0, 1.5, 8.5, -0.5]


def test_the_fp32_scale_is_amax_over_448_as_float32():
    assert quantize_groups(row(1.0), FP32).scale.tolist() == [[0.0022321429569274187]]


def test_the_largest_value_of_a_group_gets_the_largest_code():
    assert quantize_groups(row(0.3, -0.1), FP32).codes[0, 0].item() == 448.0


def test_fp32_codes_come_from_the_ratio_before_the_scale_is_rounded():
    # 27/64 * 448/9 = 21, a tie that goes to the even 20; over the float32 scale, which is a
    # little below 9/448, it would be above the tie and give 22.
    assert quantize_groups(row(9.0, 27 / 64), FP32).codes[0, :2].tolist() == [448.0, 20.0]


@pytest.mark.parametrize(
    ("scale_format", "scale"), [(FP32, 1e-10 / 448), (UE8M0, 2.0**-42)], ids=["fp32", "ue8m0"]
)
def test_a_group_of_zeros_takes_the_floor(scale_format, scale):
    got = quantize_groups(row(0.0), scale_format)
    assert got.scale.item() == pytest.approx(scale, rel=1e-7)


def test_a_group_below_the_floor_does_not_reach_the_largest_code():
    # 1e-11 * 448 / 1e-10 = 44.8; codes near it are multiples of 4.
    assert quantize_groups(row(1e-11), FP32).codes[0, 0].item() == 44.0


def test_each_group_of_a_row_has_a_scale_of_its_own():
    x = torch.cat([row(448.0), row(896.0)], dim=1)
    assert quantize_groups(x, UE8M0).scale.tolist() == [[1.0, 2.0]]


def test_the_group_size_sets_the_number_of_scales():
    x = torch.cat([row(448.0, columns=32), row(7.0, columns=32)], dim=1)
    assert quantize_groups(x, UE8M0, group_size=32).scale.tolist() == [[1.0, 2.0**-6]]


def test_dequantised_groups_are_codes_times_their_own_scale():
    x = torch.cat([row(450.0, 17.0, columns=32), row(7.0, columns=32)], dim=1)
    got = quantize_groups(x, UE8M0, group_size=32).dequantized
    assert got[0, [0, 1, 32]].tolist() == [448.0, 16.0, 7.0]


@pytest.mark.parametrize("scale_format", [FP32, UE8M0])
def test_nan_becomes_448_and_leaves_the_scale_to_the_rest(scale_format):
    got = quantize_groups(row(448.0, math.nan), scale_format)
    assert (got.scale.item(), got.codes[0, 1].item()) == (1.0, 448.0)


@pytest.mark.parametrize("scale_format", [FP32, UE8M0])
def test_an_infinity_poisons_its_whole_group(scale_format):
    got = quantize_groups(row(math.inf, 1.0), scale_format)
    assert not got.dequantized.isfinite().any()


@pytest.mark.parametrize("scale_format", [FP32, UE8M0])
def test_beside_an_infinity_finite_values_have_code_zero(scale_format):
    assert quantize_groups(row(math.inf, 1.0), scale_format).codes[0, 1].item() == 0.0


@pytest.mark.parametrize("scale_format", [FP32, UE8M0])
def test_no_rows_quantise_to_no_rows(scale_format):
    got = quantize_groups(torch.zeros(0, 256, dtype=torch.float64), scale_format)
    assert (got.dequantized.shape, got.scale.shape) == ((0, 256), (0, 2))


def test_a_row_that_does_not_divide_into_groups_is_refused():
    with pytest.raises(ValueError, match="100 columns do not divide into groups of 128"):
        quantize_groups(row(1.0, columns=100), UE8M0)


@pytest.mark.parametrize("quantize", [quantize_groups, quantize_blocks])
def test_a_quantiser_without_a_scale_format_is_refused(quantize):
    with pytest.raises(ValueError, match="fp32 or ue8m0, not none"):
        quantize(row(1.0), ScaleFormat.NONE)


def test_edge_blocks_have_scales_of_their_own():
    w = torch.zeros(130, 200, dtype=torch.float64)
    w[0, 0], w[127, 128], w[128, 0], w[129, 199] = 448.0, 896.0, 1792.0, 3584.0
    assert quantize_blocks(w, UE8M0).scale.tolist() == [[1.0, 2.0], [4.0, 8.0]]


def test_dequantised_blocks_keep_the_shape_of_a_cut_weight():
    w = torch.zeros(130, 200, dtype=torch.float64)
    w[0, 0], w[127, 128], w[128, 0], w[129, 199] = 448.0, 896.0, 1792.0, 3584.0
    assert torch.equal(quantize_blocks(w, UE8M0).dequantized, w)


@pytest.mark.parametrize(
    ("scale_format", "scale"), [(FP32, 1e-4 / 448), (UE8M0, 2.0**-22)], ids=["fp32", "ue8m0"]
)
def test_a_block_of_zeros_takes_the_weight_floor(scale_format, scale):
    got = quantize_blocks(torch.zeros(4, 4, dtype=torch.float64), scale_format)
    assert got.scale.item() == pytest.approx(scale, rel=1e-7)


def requantized(codes: list[float], scale_inv: float):
    scale = torch.tensor([[scale_inv]], dtype=torch.float64)
    return requantize_weight(torch.tensor([codes], dtype=torch.float64), scale)


def test_requantising_rounds_the_scale_up_and_the_codes_again():
    # 448 * 3 needs scale 4: 336 is a tie between 320 and 352 and goes to the even 320.
    got = requantized([448.0, 1.0], 3.0)
    assert (got.scale.item(), got.codes.tolist()) == (4.0, [[320.0, 0.75]])


def test_requantising_keeps_a_weight_whose_scale_is_a_power_of_two():
    got = requantized([448.0, -1.125, 2.0**-9], 0.25)
    assert got.dequantized.tolist() == [[112.0, -0.28125, 2.0**-11]]


def test_requantising_passes_through_bf16():
    # 1.125 * 129/128 = 145.125/128 is stored as 145/128.
    got = requantized([1.125], 129 / 128)
    assert (got.scaled * got.scale).item() == 145 / 128


def test_requantising_multiplies_in_float32():
    # The exact product lies below the tie 1.02734375; as float32 it is the tie, which goes up.
    got = requantized([1.125], float.fromhex("0x1.d38e38p-1"))
    assert (got.scaled * got.scale).item() == 1.03125


def test_requantising_uses_each_blocks_scale():
    codes = torch.full((1, 256), 448.0, dtype=torch.float64)
    scale_inv = torch.tensor([[1.0, 8.0]], dtype=torch.float64)
    assert requantize_weight(codes, scale_inv).scale.tolist() == [[1.0, 8.0]]
