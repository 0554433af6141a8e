"""The golden model's number formats against ml_dtypes, over every code point."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from moe.golden import (
    decode_e2m1,
    decode_e4m3,
    decode_ue8m0,
    round_bf16,
    round_e2m1,
    round_e4m3,
    unpack_ue8m0,
)

E4M3_CODES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)
E4M3_POSITIVE = E4M3_CODES[:0x7F]
E2M1_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
with np.errstate(invalid="ignore"):  # numpy warns of signalling NaN codes
    BF16_CODES = np.arange(65536, dtype=np.uint16).view(ml_dtypes.bfloat16).astype(np.float64)
# The codes below infinity, and 2^128 in infinity's place: where the next code would stand.
BF16_POSITIVE = np.append(BF16_CODES[:0x7F80], 2.0**128)
SIGNS = pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])


def midpoints(grid: np.ndarray) -> np.ndarray:
    return (grid[:-1] + grid[1:]) / 2


def even_neighbours(grid: np.ndarray) -> np.ndarray:
    """For each pair of neighbouring codes, the value of the even one."""
    lower = np.arange(grid.size - 1)
    return grid[lower + lower % 2]


def overflow_to_inf(values: np.ndarray) -> np.ndarray:
    return np.where(np.abs(values) == 2.0**128, np.copysign(np.inf, values), values)


def same(got: torch.Tensor, expected: np.ndarray) -> bool:
    """Equal values, zeros of equal sign, NaN where NaN is expected."""
    actual = got.numpy()
    return bool(
        np.array_equal(actual, expected, equal_nan=True)
        and np.array_equal(np.signbit(actual), np.signbit(expected))
    )


def test_every_e4m3_code_decodes_as_in_ml_dtypes():
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(decode_e4m3(codes).numpy(), E4M3_CODES)


def test_decoding_keeps_the_shape_of_the_codes():
    assert decode_e4m3(torch.zeros(2, 3, 4, dtype=torch.uint8)).shape == (2, 3, 4)


def test_every_finite_e4m3_value_rounds_to_itself():
    finite = E4M3_CODES[~np.isnan(E4M3_CODES)]
    assert same(round_e4m3(torch.from_numpy(finite)), finite)


@SIGNS
def test_an_e4m3_midpoint_rounds_to_the_even_code(sign):
    ties = torch.from_numpy(sign * midpoints(E4M3_POSITIVE))
    assert same(round_e4m3(ties), sign * even_neighbours(E4M3_POSITIVE))


@SIGNS
def test_the_next_float64_above_an_e4m3_midpoint_rounds_up(sign):
    above = np.nextafter(midpoints(E4M3_POSITIVE), np.inf)
    assert same(round_e4m3(torch.from_numpy(sign * above)), sign * E4M3_POSITIVE[1:])


@SIGNS
def test_the_next_float64_below_an_e4m3_midpoint_rounds_down(sign):
    below = np.nextafter(midpoints(E4M3_POSITIVE), 0.0)
    assert same(round_e4m3(torch.from_numpy(sign * below)), sign * E4M3_POSITIVE[:-1])


def test_e4m3_rounding_agrees_with_ml_dtypes_inside_the_range():
    # float32 values, since ml_dtypes may pass through float32; up to 448, since it then differs.
    drawn = np.random.default_rng(5).standard_normal(50_000).astype(np.float32) * 60
    inside = np.clip(drawn, -448, 448).astype(np.float64)
    expected = inside.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert same(round_e4m3(torch.from_numpy(inside)), expected)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (464.0, 448.0),
        (480.0, 448.0),
        (1e300, 448.0),
        (math.inf, 448.0),
        (-465.0, -448.0),
        (-math.inf, -448.0),
        (math.nan, 448.0),
        (math.copysign(math.nan, -1.0), 448.0),
    ],
    ids=["464", "480", "1e300", "inf", "-465", "-inf", "nan", "-nan"],
)
def test_e4m3_saturates_where_the_format_has_nan(value, expected):
    assert round_e4m3(torch.tensor([value], dtype=torch.float64)).tolist() == [expected]


def test_ml_dtypes_makes_nan_of_an_e4m3_overflow():
    # The difference that keeps ml_dtypes from being the oracle beyond 448.
    assert np.isnan(np.float64(480.0).astype(ml_dtypes.float8_e4m3fn).astype(np.float64))


def test_every_e2m1_code_decodes_to_its_value():
    expected = np.concatenate([E2M1_POSITIVE, -E2M1_POSITIVE])
    assert same(decode_e2m1(torch.arange(16, dtype=torch.uint8)), expected)


@SIGNS
@pytest.mark.parametrize(
    ("towards", "expected"),
    [
        (None, [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]),
        (np.inf, E2M1_POSITIVE[1:]),
        (0.0, E2M1_POSITIVE[:-1]),
    ],
    ids=["tie", "above", "below"],
)
def test_e2m1_midpoints_and_the_next_float64_round_to_nearest(towards, expected, sign):
    ties = midpoints(E2M1_POSITIVE)
    x = ties if towards is None else np.nextafter(ties, towards)
    assert same(round_e2m1(torch.from_numpy(sign * x)), sign * np.asarray(expected))


@pytest.mark.parametrize(
    ("value", "expected"),
    [(1e300, 6.0), (math.inf, 6.0), (-6.5, -6.0), (-math.inf, -6.0), (math.nan, 6.0)],
    ids=["1e300", "inf", "-6.5", "-inf", "nan"],
)
def test_e2m1_saturates(value, expected):
    assert round_e2m1(torch.tensor([value], dtype=torch.float64)).tolist() == [expected]


def test_every_bf16_value_rounds_to_itself():
    assert same(round_bf16(torch.from_numpy(BF16_CODES)), BF16_CODES)


@SIGNS
def test_a_bf16_midpoint_rounds_to_the_even_code(sign):
    ties = torch.from_numpy(sign * midpoints(BF16_POSITIVE))
    assert same(round_bf16(ties), overflow_to_inf(sign * even_neighbours(BF16_POSITIVE)))


@SIGNS
def test_the_next_float64_above_a_bf16_midpoint_rounds_up(sign):
    above = np.nextafter(midpoints(BF16_POSITIVE), np.inf)
    assert same(
        round_bf16(torch.from_numpy(sign * above)), overflow_to_inf(sign * BF16_POSITIVE[1:])
    )


@SIGNS
def test_the_next_float64_below_a_bf16_midpoint_rounds_down(sign):
    below = np.nextafter(midpoints(BF16_POSITIVE), 0.0)
    assert same(round_bf16(torch.from_numpy(sign * below)), sign * BF16_POSITIVE[:-1])


def test_bf16_rounding_agrees_with_ml_dtypes_on_float32_values():
    drawn = np.random.default_rng(6).integers(0, 2**32, 50_000, dtype=np.uint32).view(np.float32)
    finite = drawn[np.isfinite(drawn)].astype(np.float64)
    expected = finite.astype(ml_dtypes.bfloat16).astype(np.float64)
    assert same(round_bf16(torch.from_numpy(finite)), expected)


def test_bf16_rounding_takes_one_step_from_float64():
    # Through float32 this becomes the tie 1 + 2^-8, and then 1.
    above_the_tie = torch.tensor([1 + 2.0**-8 + 2.0**-40], dtype=torch.float64)
    assert round_bf16(above_the_tie).tolist() == [1.0078125]


@pytest.mark.parametrize("value", [2.0**128, 1e300, math.inf])
def test_bf16_overflows_to_infinity(value):
    assert round_bf16(torch.tensor([value, -value], dtype=torch.float64)).tolist() == [
        math.inf,
        -math.inf,
    ]


@pytest.mark.parametrize("rounding", [round_e2m1, round_e4m3, round_bf16])
def test_rounding_leaves_its_argument_alone(rounding):
    x = torch.tensor([0.3, -1e300, math.nan], dtype=torch.float64)
    before = x.clone()
    rounding(x)
    assert torch.equal(x.view(torch.int64), before.view(torch.int64))


@pytest.mark.parametrize("rounding", [round_e2m1, round_e4m3, round_bf16])
def test_rounding_reads_a_transposed_tensor(rounding):
    x = torch.arange(12, dtype=torch.float64).view(3, 4) * 1.37
    assert torch.equal(rounding(x.T), rounding(x.T.contiguous()))


def test_every_ue8m0_byte_is_a_power_of_two_and_255_is_nan():
    expected = [2.0 ** (byte - 127) for byte in range(255)] + [math.nan]
    got = decode_ue8m0(torch.arange(256, dtype=torch.int64).to(torch.uint8))
    np.testing.assert_array_equal(got.numpy(), np.array(expected))


def test_ue8m0_bytes_unpack_from_the_least_significant():
    packed = torch.tensor([[0x8281807F - 2**32, 0x00008483]], dtype=torch.int32)
    assert unpack_ue8m0(packed, 6).tolist() == [[1.0, 2.0, 4.0, 8.0, 16.0, 32.0]]


def test_ue8m0_unpacks_the_column_major_layout():
    # Two rows in a buffer padded to four: strides (1, 4).
    packed = torch.tensor([[0x7F, 0x80, 0, 0], [0x81, 0x82, 0, 0]], dtype=torch.int32).T[:2]
    scales = unpack_ue8m0(packed, 8)
    assert scales[:, [0, 4]].tolist() == [[1.0, 4.0], [2.0, 8.0]]


def test_unpacking_refuses_a_wrong_number_of_words():
    with pytest.raises(ValueError, match="9 groups take 3 words, got 2"):
        unpack_ue8m0(torch.zeros(1, 2, dtype=torch.int32), 9)
