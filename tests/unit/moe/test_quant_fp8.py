"""Quantisers to e4m3 against numpy and ml_dtypes, and against literals at the edges."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from moe.formats import ScaleFormat
from moe.quant.fp8 import (
    QuantizedBlocks,
    dequantize_blocks,
    dequantize_groups,
    e4m3_to_fp32,
    group_scales,
    quantize_blocks,
    quantize_groups,
    round_to_e4m3,
)
from moe.quant.ue8m0 import pack_ue8m0, unpack_ue8m0

ALL_CODES = np.arange(256, dtype=np.uint8)
VALUES = ALL_CODES.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
POSITIVE = VALUES[:0x7F]
MIDPOINTS = ((POSITIVE[:-1].astype(np.float64) + POSITIVE[1:]) / 2).astype(np.float32)
FORMATS = pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])


def codes_of(values: torch.Tensor) -> np.ndarray:
    return values.view(torch.uint8).numpy()


def e4m3_codes(values: np.ndarray) -> np.ndarray:
    """float32 to code bytes by ml_dtypes, saturating, NaN as +448."""
    clamped = np.clip(np.nan_to_num(values, nan=448.0, posinf=448.0, neginf=-448.0), -448, 448)
    return clamped.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def power_not_under(scale: np.float32) -> int:
    """Exponent of the smallest power of two that is not under ``scale``."""
    mantissa, exponent = math.frexp(float(scale))
    return exponent - 1 if mantissa == 0.5 else exponent


def group_oracle(group: np.ndarray, scale_format: ScaleFormat) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of one group of float32 values, one float32 operation at a time."""
    amax = np.maximum(np.nanmax(np.abs(group)), np.float32(1e-10))
    scale = amax * (np.float32(1) / np.float32(448))
    if scale_format is ScaleFormat.FP32:
        return e4m3_codes(group * (np.float32(448) / amax)), scale
    power = power_not_under(scale)
    return e4m3_codes(group * np.float32(2.0**-power)), np.float32(2.0**power)


def block_oracle(block: np.ndarray, scale_format: ScaleFormat) -> tuple[np.ndarray, np.float32]:
    """Codes and scale of one block of float32 values, one float32 operation at a time."""
    scale = np.maximum(np.abs(block).max(), np.float32(1e-4)) / np.float32(448)
    if scale_format is ScaleFormat.UE8M0:
        scale = np.float32(2.0 ** power_not_under(scale))
    return e4m3_codes(block * (np.float32(1) / scale)), scale


def spread(low: int, high: int) -> torch.Tensor:
    """A group of both signs whose magnitudes are powers of two from 2^low to 2^high."""
    exponents = torch.linspace(low, high, 128).round()
    return torch.exp2(exponents) * torch.tensor([1.0, -1.0]).repeat(64)


def with_largest(amax: float) -> torch.Tensor:
    return torch.cat([torch.tensor([-amax]), torch.linspace(-amax / 2, amax / 2, 127)])


GROUPS = {
    "random": torch.randn(128, generator=torch.Generator().manual_seed(3)),
    "large": torch.randn(128, generator=torch.Generator().manual_seed(4)) * 1e30,
    "zeros": torch.zeros(128),
    "tiny": torch.full((128,), 1e-38),
    "under-the-floor": torch.full((128,), 1e-11),
    "spread": spread(-20, 20),
    "tiny-spread": spread(-60, -20),
    "one-value": torch.nn.functional.one_hot(torch.tensor(77), 128) * -3.0,
    "nan-element": torch.cat([torch.tensor([torch.nan]), torch.linspace(-3, 2, 127)]),
    **{f"amax-448x2^{k}": with_largest(448 * 2.0**k) for k in (-20, -1, 0, 1, 9)},
    **{f"amax-450x2^{k}": with_largest(450 * 2.0**k) for k in (-20, 0, 9)},
    **{f"amax-446x2^{k}": with_largest(446 * 2.0**k) for k in (-20, 0, 9)},
}


@pytest.mark.parametrize("code", [c for c in range(256) if c & 0x7F != 0x7F], ids=hex)
def test_a_code_survives_decoding_and_rounding(code):
    value = e4m3_to_fp32(torch.tensor([code], dtype=torch.uint8).view(torch.float8_e4m3fn))
    assert codes_of(round_to_e4m3(value)).tolist() == [code]


def test_every_code_decodes_as_in_ml_dtypes():
    codes = torch.from_numpy(ALL_CODES).view(torch.float8_e4m3fn)
    np.testing.assert_array_equal(e4m3_to_fp32(codes).numpy(), VALUES)


def test_decoding_keeps_shape_and_order_of_a_transposed_tensor():
    codes = torch.arange(12, dtype=torch.uint8).view(3, 4).view(torch.float8_e4m3fn).T
    assert e4m3_to_fp32(codes).tolist() == VALUES[:12].reshape(3, 4).T.tolist()


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize("towards", [None, np.inf, 0.0], ids=["tie", "above", "below"])
def test_midpoints_and_their_neighbours_round_as_in_ml_dtypes(towards, sign):
    points = MIDPOINTS if towards is None else np.nextafter(MIDPOINTS, np.float32(towards))
    values = (sign * points).astype(np.float32)
    expected = values.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(codes_of(round_to_e4m3(torch.from_numpy(values))), expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (448.0, 448.0),
        (464.0, 448.0),
        (3e38, 448.0),
        (math.inf, 448.0),
        (-465.0, -448.0),
        (-math.inf, -448.0),
        (math.nan, 448.0),
        (math.copysign(math.nan, -1.0), 448.0),
    ],
    ids=["448", "464", "3e38", "inf", "-465", "-inf", "nan", "-nan"],
)
def test_values_beyond_the_format_saturate(value, expected):
    assert round_to_e4m3(torch.tensor([value])).to(torch.float32).tolist() == [expected]


@FORMATS
@pytest.mark.parametrize("name", GROUPS)
def test_a_group_is_quantised_as_by_the_oracle(name, scale_format):
    group = GROUPS[name].to(torch.bfloat16)
    codes, scale = group_oracle(group.to(torch.float32).numpy(), scale_format)
    got = quantize_groups(group[None], scale_format)
    np.testing.assert_array_equal(codes_of(got.values)[0], codes)
    assert group_scales(got.scale, 1).tolist() == [[float(scale)]]


@FORMATS
def test_every_group_of_a_row_has_a_scale_of_its_own(scale_format):
    rows = torch.stack([torch.cat([GROUPS["random"] * 2.0**k for k in (0, 5, -7)])] * 2)
    rows[1] *= 8
    got = quantize_groups(rows.to(torch.bfloat16), scale_format)
    first = group_scales(got.scale, 3)[0, 0]
    expected = torch.tensor([[1.0, 2**5, 2**-7], [8, 2**8, 2**-4]]) * first
    assert torch.equal(group_scales(got.scale, 3), expected)


@pytest.mark.parametrize(
    ("scale_format", "expected"),
    [(ScaleFormat.FP32, 2.232142791e-13), (ScaleFormat.UE8M0, 2.0**-42)],
    ids=["fp32", "ue8m0"],
)
def test_a_row_of_zeros_gets_the_scale_of_the_floor(scale_format, expected):
    got = quantize_groups(torch.zeros(1, 128, dtype=torch.bfloat16), scale_format)
    assert group_scales(got.scale, 1).item() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize(
    ("scale_format", "codes"),
    [
        # inf * 2^-128 saturates and finite values vanish; with fp32 scales inf * 0 is NaN.
        (ScaleFormat.UE8M0, [448.0, -448.0, 0.0, 448.0]),
        (ScaleFormat.FP32, [448.0, 448.0, 0.0, 448.0]),
    ],
    ids=["ue8m0", "fp32"],
)
def test_a_group_with_an_infinity_saturates(scale_format, codes):
    group = torch.zeros(1, 128, dtype=torch.bfloat16)
    group[0, :4] = torch.tensor([torch.inf, -torch.inf, 1.0, torch.nan])
    got = quantize_groups(group, scale_format)
    assert got.values[0, :4].to(torch.float32).tolist() == codes


@pytest.mark.parametrize(
    ("scale_format", "expected"),
    [(ScaleFormat.UE8M0, math.nan), (ScaleFormat.FP32, math.inf)],
    ids=["ue8m0", "fp32"],
)
def test_the_scale_of_a_group_with_an_infinity_cannot_pass_for_a_number(scale_format, expected):
    group = torch.zeros(1, 128, dtype=torch.bfloat16)
    group[0, 5] = -torch.inf
    scale = group_scales(quantize_groups(group, scale_format).scale, 1).numpy()
    np.testing.assert_array_equal(scale, [[expected]])


def test_ue8m0_scales_are_stored_packed_and_mn_major():
    scale = quantize_groups(torch.ones(5, 5 * 128, dtype=torch.bfloat16), ScaleFormat.UE8M0).scale
    assert (scale.dtype, scale.shape, scale.stride()) == (torch.int32, (5, 2), (1, 8))


def test_fp32_scales_are_stored_row_major():
    scale = quantize_groups(torch.ones(5, 5 * 128, dtype=torch.bfloat16), ScaleFormat.FP32).scale
    assert (scale.dtype, scale.shape, scale.stride()) == (torch.float32, (5, 5), (5, 1))


@FORMATS
def test_no_rows_make_no_codes(scale_format):
    got = quantize_groups(torch.zeros(0, 256, dtype=torch.bfloat16), scale_format)
    assert got.values.shape == (0, 256)
    assert group_scales(got.scale, 2).shape == (0, 2)


def test_columns_that_split_a_group_are_refused():
    with pytest.raises(ValueError, match="200 columns do not split into groups of 128"):
        quantize_groups(torch.zeros(1, 200), ScaleFormat.FP32)


@pytest.mark.parametrize("packed", [True, False], ids=["ue8m0", "fp32"])
def test_dequantising_multiplies_each_group_by_its_scale(packed):
    codes = torch.tensor([[1.5] * 128 + [-2.0] * 128]).to(torch.float8_e4m3fn)
    exponents = torch.tensor([[128, 124]], dtype=torch.uint8)
    scale = pack_ue8m0(exponents) if packed else torch.tensor([[2.0, 0.125]])
    assert dequantize_groups(codes, scale).tolist() == [[3.0] * 128 + [-0.25] * 128]


@FORMATS
@pytest.mark.parametrize(
    "shape", [(128, 128), (200, 300), (1, 1), (129, 257)], ids=lambda s: f"{s[0]}x{s[1]}"
)
def test_a_block_is_quantised_as_by_the_oracle(shape, scale_format):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)
    got = quantize_blocks(drawn, scale_format)
    matrix = drawn.to(torch.float32).numpy()
    for row in range(0, shape[0], 128):
        for column in range(0, shape[1], 128):
            here = np.s_[row : row + 128, column : column + 128]
            codes, scale = block_oracle(matrix[here], scale_format)
            np.testing.assert_array_equal(codes_of(got.values)[here], codes)
            assert got.scale_inv[row // 128, column // 128].item() == float(scale)


@pytest.mark.parametrize(
    ("scale_format", "expected"),
    [(ScaleFormat.FP32, 1e-4 / 448), (ScaleFormat.UE8M0, 2.0**-22)],
    ids=["fp32", "ue8m0"],
)
def test_a_block_of_zeros_gets_the_scale_of_the_floor(scale_format, expected):
    got = quantize_blocks(torch.zeros(128, 128), scale_format)
    assert got.scale_inv.item() == pytest.approx(expected, rel=1e-7)


def test_a_block_scale_that_is_a_power_of_two_stays():
    matrix = torch.zeros(128, 128)
    matrix[3, 4] = -448 * 0.25
    assert quantize_blocks(matrix, ScaleFormat.UE8M0).scale_inv.tolist() == [[0.25]]


@FORMATS
def test_matrices_of_a_batch_are_quantised_each_on_its_own(scale_format):
    batch = torch.randn(2, 130, 140, generator=torch.Generator().manual_seed(6))
    together = quantize_blocks(batch, scale_format)
    for index in range(2):
        alone = quantize_blocks(batch[index], scale_format)
        assert torch.equal(codes_at(together, index), alone.values.view(torch.uint8))
        assert torch.equal(together.scale_inv[index], alone.scale_inv)


def codes_at(blocks: QuantizedBlocks, index: int) -> torch.Tensor:
    return blocks.values[index].view(torch.uint8)


@pytest.mark.parametrize(
    ("row", "column", "expected"),
    [(0, 0, 2.0), (127, 127, 2.0), (0, 128, 6.0), (128, 127, 10.0), (129, 130, 14.0)],
)
def test_dequantising_multiplies_each_block_by_its_scale(row, column, expected):
    blocks = QuantizedBlocks(
        values=torch.full((130, 131), 2.0).to(torch.float8_e4m3fn),
        scale_inv=torch.tensor([[1.0, 3.0], [5.0, 7.0]]),
    )
    assert dequantize_blocks(blocks)[row, column].item() == expected


def test_ue8m0_groups_lose_no_more_than_half_a_step_of_their_values():
    rows = torch.randn(64, 256, generator=torch.Generator().manual_seed(8)).to(torch.bfloat16)
    got = quantize_groups(rows, ScaleFormat.UE8M0)
    exact = rows.to(torch.float64)
    error = (dequantize_groups(got.values, got.scale).to(torch.float64) - exact).abs()
    # Relative half step of the normal codes, absolute half step of the subnormal ones.
    scale = torch.exp2(unpack_ue8m0(got.scale, 2).to(torch.float64) - 127)
    bound = torch.maximum(exact.abs() * 2.0**-4, scale.repeat_interleave(128, 1) * 2.0**-10)
    assert bool((error <= bound).all())
