"""Stored numbers that make no weight, and the nearest that do."""

import math

import pytest
import torch

from moe.recipes import WeightFormat
from scenarios.checkpoint_checks import check_products, check_scale, check_values
from scenarios.checkpoint_files import CheckpointError, StoredTensor

STORED = StoredTensor(file="f", name="w", shape=(2, 4), dtype="")
BLOCKS, ONE = WeightFormat.FP8_BLOCK128, WeightFormat.FP8_PER_TENSOR


def refused(check, *arguments):
    """What the one problem says of the tensor."""
    with pytest.raises(CheckpointError) as caught:
        check(STORED, *arguments)
    (problem,) = caught.value.problems
    assert (problem.file, problem.tensor) == ("f", "w")
    return problem.message


def e4m3(*codes):
    return torch.tensor([codes], dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("value", "shown"), [(math.nan, "NaN"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_a_value_that_is_no_finite_number_is_refused(value, shown, dtype):
    values = torch.zeros(2, 4, dtype=dtype)
    values[1, 2:] = value
    assert refused(check_values, values) == f"the value at [1, 2] is {shown}"


@pytest.mark.parametrize("code", [0x7F, 0xFF], ids=hex)
def test_a_code_that_is_nan_is_refused(code):
    assert refused(check_values, e4m3(0, 0x7E, code, 0xFE)) == "the value at [0, 2] is NaN"


def test_the_entry_of_a_fused_tensor_stands_first():
    assert refused(check_values, e4m3(0, 0x7F), 3) == "the value at [3, 0, 1] is NaN"


@pytest.mark.parametrize(
    "values",
    [
        e4m3(*[code for code in range(256) if code & 0x7F != 0x7F]),
        torch.arange(256, dtype=torch.uint8)[None],
        torch.tensor([torch.finfo(torch.bfloat16).max, 0.0, -1.0]).to(torch.bfloat16),
    ],
    ids=["e4m3", "fp4", "bf16"],
)
def test_values_that_are_finite_pass(values):
    check_values(STORED, values)


POSITIVE = "a positive finite number that is not subnormal"
NOT_NEGATIVE = "a finite number that is not negative"


@pytest.mark.parametrize(
    ("form", "scale", "shown", "wanted"),
    [
        (ONE, 0.0, "0", POSITIVE),
        (ONE, -0.25, "-0.25", POSITIVE),
        (ONE, math.inf, "inf", POSITIVE),
        (ONE, math.nan, "NaN", POSITIVE),
        (ONE, 2.0**-127, "5.87747175e-39", POSITIVE),
        (BLOCKS, -0.25, "-0.25", NOT_NEGATIVE),
        (BLOCKS, math.inf, "inf", NOT_NEGATIVE),
        (BLOCKS, -math.inf, "-inf", NOT_NEGATIVE),
        (BLOCKS, math.nan, "NaN", NOT_NEGATIVE),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_factor_that_scales_nothing_is_refused(form, scale, shown, wanted, dtype):
    factors = torch.tensor([1.0, scale], dtype=dtype)
    message = f"the scale at [1] is {shown}; wanted {wanted}"
    assert refused(check_scale, factors, form) == message


def test_a_scalar_has_no_place():
    message = refused(check_scale, torch.tensor(0.0), ONE)
    assert message == f"the scale is 0; wanted {POSITIVE}"


def test_an_exponent_of_255_is_refused():
    exponents = torch.tensor([[0, 254], [255, 255]], dtype=torch.uint8)
    message = refused(check_scale, exponents, WeightFormat.MXFP4, 5)
    assert message == "the scale at [5, 1, 0] is NaN; wanted a power of two"


@pytest.mark.parametrize(
    ("form", "scale"),
    [
        (ONE, torch.tensor(2.0**-126)),
        (ONE, torch.tensor([0.3])),
        (BLOCKS, torch.tensor([[0.0, 2.0**-149]])),
        (BLOCKS, torch.arange(255, dtype=torch.uint8)),
        (WeightFormat.MXFP8, torch.arange(255, dtype=torch.uint8)),
    ],
    ids=["smallest", "vector", "zero-and-subnormal", "bytes-of-blocks", "bytes-of-groups"],
)
def test_scales_of_weights_pass(form, scale):
    check_scale(STORED, scale, form)


def products(code, factor):
    return torch.tensor([[1.0, code]], dtype=torch.float64), torch.tensor(
        [[1.0, factor]], dtype=torch.float64
    )


@pytest.mark.parametrize(
    ("code", "factor", "shown"),
    [
        (-448.0, 2.0**127, "-448 * 1.70141183e+38"),
        (2.0, 2.0**127, "2 * 1.70141183e+38"),
        (6.0, 2.0**126, "6 * 8.50705917e+37"),
        (511 / 256, 2.0**127, "1.99609375 * 1.70141183e+38"),
    ],
    ids=["e4m3", "block", "fp4", "half-a-step-over-the-largest"],
)
def test_a_product_beyond_bf16_is_refused(code, factor, shown):
    message = f"the value at [2, 0, 1] overflows bf16: {shown}"
    assert refused(check_products, *products(code, factor), 2) == message


@pytest.mark.parametrize(
    ("code", "factor"),
    [(0.0, 2.0**127), (1.5, 2.0**127), (-255 / 128, 2.0**127), (6.0, 2.0**125)],
)
def test_a_product_within_bf16_passes(code, factor):
    check_products(STORED, *products(code, factor))


def test_one_factor_multiplies_every_code():
    codes = torch.tensor([[1.0, -4.0]], dtype=torch.float64)
    message = refused(check_products, codes, torch.tensor([[2.0**126]], dtype=torch.float64))
    assert message == "the value at [0, 1] overflows bf16: -4 * 8.50705917e+37"
