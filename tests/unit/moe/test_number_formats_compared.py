"""The pipeline's number formats, the golden model's and ml_dtypes' on the same points."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
    round_ue8m0_up,
)
from moe.quant.e2m1 import e2m1_to_fp32, round_to_e2m1
from moe.quant.fp8 import e4m3_to_fp32, round_to_e4m3
from moe.quant.ue8m0 import exponent_rounded_up, scale_from_exponent


@dataclass(frozen=True, kw_only=True)
class Format:
    """One format three times over.

    positive  float64 values of the codes from +0 up, and what follows the largest finite one where
              rounding may reach it
    oracle    its dtype in ml_dtypes
    fast      the pipeline's rounding, fp32 to the fp32 value of the code
    golden    the golden rounding, float64 to float64
    specials  what inf, -inf and NaN become
    """

    positive: np.ndarray
    oracle: Any
    fast: Callable[[torch.Tensor], torch.Tensor]
    golden: Callable[[torch.Tensor], torch.Tensor]
    specials: tuple[float, float, float]


def values_of_codes(num_codes: int, storage: Any, oracle: Any) -> np.ndarray:
    with np.errstate(invalid="ignore"):  # numpy warns of signalling NaN codes
        return np.arange(num_codes).astype(storage).view(oracle).astype(np.float64)


E2M1 = values_of_codes(16, np.uint8, ml_dtypes.float4_e2m1fn)
E4M3 = values_of_codes(256, np.uint8, ml_dtypes.float8_e4m3fn)
BF16 = values_of_codes(65536, np.uint16, ml_dtypes.bfloat16)
UE8M0 = values_of_codes(256, np.uint8, ml_dtypes.float8_e8m0fnu)

FORMATS = {
    "e2m1": Format(
        positive=E2M1[:8],
        oracle=ml_dtypes.float4_e2m1fn,
        fast=lambda x: e2m1_to_fp32(round_to_e2m1(x)),
        golden=round_e2m1,
        specials=(6.0, -6.0, 6.0),
    ),
    "e4m3": Format(
        positive=E4M3[:0x7F],
        oracle=ml_dtypes.float8_e4m3fn,
        fast=lambda x: e4m3_to_fp32(round_to_e4m3(x)),
        golden=round_e4m3,
        specials=(448.0, -448.0, 448.0),
    ),
    "bf16": Format(
        positive=np.append(BF16[:0x7F80], 2.0**128),
        oracle=ml_dtypes.bfloat16,
        fast=lambda x: x.to(torch.bfloat16).to(torch.float32),
        golden=round_bf16,
        specials=(math.inf, -math.inf, math.nan),
    ),
}
EVERY_FORMAT = pytest.mark.parametrize("name", FORMATS)
SIGNS = pytest.mark.parametrize("sign", [1.0, -1.0], ids=["positive", "negative"])


def points(positive: np.ndarray, place: str) -> np.ndarray:
    """float32: the codes, or the ties between neighbours, or the float32 beside each tie."""
    ties = ((positive[:-1] + positive[1:]) / 2).astype(np.float32)
    match place:
        case "code":
            return positive[:-1].astype(np.float32)
        case "tie":
            return ties
        case "above":
            return np.nextafter(ties, np.float32(np.inf))
        case _:
            return np.nextafter(ties, np.float32(0.0))


def assert_same(got: torch.Tensor, expected: np.ndarray) -> None:
    """Equal values, zeros of equal sign, NaN where NaN is expected."""
    actual = got.to(torch.float64).numpy()
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(expected))


def by_oracle(points_f32: np.ndarray, oracle: Any) -> np.ndarray:
    with np.errstate(over="ignore"):
        return points_f32.astype(oracle).astype(np.float64)


@EVERY_FORMAT
@SIGNS
@pytest.mark.parametrize("place", ["code", "tie", "above", "below"])
def test_the_pipeline_rounds_as_ml_dtypes(name, sign, place):
    form = FORMATS[name]
    x = (sign * points(form.positive, place)).astype(np.float32)
    assert_same(form.fast(torch.from_numpy(x)), by_oracle(x, form.oracle))


@EVERY_FORMAT
@SIGNS
@pytest.mark.parametrize("place", ["code", "tie", "above", "below"])
def test_the_golden_model_rounds_as_ml_dtypes(name, sign, place):
    form = FORMATS[name]
    x = (sign * points(form.positive, place)).astype(np.float32)
    assert_same(form.golden(torch.from_numpy(x).double()), by_oracle(x, form.oracle))


@EVERY_FORMAT
def test_any_float32_rounds_alike_in_the_pipeline_and_in_the_golden_model(name):
    bits = np.random.default_rng(7).integers(0, 2**32, 50_000, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32)).nan_to_num(nan=1.0, posinf=2.0, neginf=3.0)
    form = FORMATS[name]
    assert_same(form.fast(x), form.golden(x.double()).numpy())


@EVERY_FORMAT
@pytest.mark.parametrize("side", ["fast", "golden"])
@pytest.mark.parametrize("index", range(3), ids=["inf", "-inf", "nan"])
def test_what_is_no_number_rounds_alike_on_both_sides(name, side, index):
    form = FORMATS[name]
    x = torch.tensor([[math.inf, -math.inf, math.nan][index]])
    got = form.fast(x) if side == "fast" else form.golden(x.double())
    np.testing.assert_array_equal(got.numpy(), [form.specials[index]])


@EVERY_FORMAT
@SIGNS
@pytest.mark.parametrize("tiny", [0.0, 2.0**-149, 2.0**-126], ids=["zero", "subnormal", "normal"])
def test_zero_and_what_vanishes_keep_their_sign_on_both_sides(name, sign, tiny):
    form = FORMATS[name]
    x = torch.tensor([math.copysign(tiny, sign)])
    assert_same(form.fast(x), form.golden(x.double()).numpy())
    assert bool(form.fast(x).signbit()) is (sign < 0)


def test_every_e2m1_code_round_trips_in_the_pipeline():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(round_to_e2m1(e2m1_to_fp32(codes)), codes)


def test_every_e4m3_code_but_nan_round_trips_in_the_pipeline():
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    back = round_to_e4m3(e4m3_to_fp32(codes.view(torch.float8_e4m3fn)))
    assert torch.equal(back.view(torch.uint8), codes)


def test_every_bf16_code_round_trips_through_fp32():
    codes = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    back = codes.to(torch.float32).to(torch.bfloat16)
    is_number = ~codes.isnan()
    assert torch.equal(back[is_number].view(torch.int16), codes[is_number].view(torch.int16))
    assert bool(back[~is_number].isnan().all())


def test_every_ue8m0_byte_of_a_normal_scale_round_trips_in_the_pipeline():
    codes = torch.arange(1, 255).to(torch.uint8)
    assert torch.equal(exponent_rounded_up(scale_from_exponent(codes)), codes)


def test_every_ue8m0_value_round_trips_in_the_golden_model():
    assert_same(round_ue8m0_up(torch.from_numpy(UE8M0)), UE8M0)


@pytest.mark.parametrize(
    ("fast", "golden", "oracle"),
    [
        (e2m1_to_fp32, decode_e2m1, E2M1),
        (lambda codes: e4m3_to_fp32(codes.view(torch.float8_e4m3fn)), decode_e4m3, E4M3),
        (scale_from_exponent, decode_ue8m0, UE8M0),
    ],
    ids=["e2m1", "e4m3", "ue8m0"],
)
def test_every_code_decodes_alike_in_all_three(fast, golden, oracle):
    codes = torch.from_numpy(np.arange(oracle.size).astype(np.uint8))
    numbers = ~np.isnan(oracle)
    assert_same(fast(codes)[numbers], oracle[numbers])
    assert_same(golden(codes)[numbers], oracle[numbers])
    assert fast(codes).isnan().tolist() == golden(codes).isnan().tolist() == (~numbers).tolist()


@pytest.mark.parametrize("towards", [None, np.inf, 0.0], ids=["power", "above", "below"])
def test_scales_round_up_alike_in_the_pipeline_and_in_the_golden_model(towards):
    powers = np.exp2(np.arange(-125, 127, dtype=np.float64)).astype(np.float32)
    x = torch.from_numpy(powers if towards is None else np.nextafter(powers, np.float32(towards)))
    fast = scale_from_exponent(exponent_rounded_up(x))
    assert_same(fast, round_ue8m0_up(x.double()).numpy())


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, 2.0**-127),
        (2.0**-200, 2.0**-127),
        (2.0**-127, 2.0**-127),
        (1.0, 1.0),
        (math.nextafter(1.0, 2.0), 2.0),
        (0.75, 1.0),
        (2.0**127, 2.0**127),
        (math.nextafter(2.0**127, math.inf), math.nan),
        (math.inf, math.nan),
        (math.nan, math.nan),
    ],
)
def test_the_golden_scale_is_the_smallest_power_not_under_a_value(value, expected):
    got = round_ue8m0_up(torch.tensor([value], dtype=torch.float64))
    np.testing.assert_array_equal(got.numpy(), [expected])
