"""Which stored products have one answer, by what a backend declares."""

import pytest
import torch

from moe.arithmetic import ArithmeticModel
from moe.formats import GatedActivation, ScaleFormat, Stage
from moe.golden import Stores
from reports.verdict.exact_rows import (
    Certain,
    CertainRows,
    Source,
    activated,
    quantised,
    stored_product,
)
from reports.verdict.exact_sums import Conditions
from reports.verdict.layer import ScaleForm
from reports.verdict.nominal_weights import NominalMatrix

CUT = ArithmeticModel(truncated_bits=14)
CUT_IN_BLOCKS = ArithmeticModel(truncated_bits=14, scaled_block=128)
FP32 = ArithmeticModel()
FP32_IN_BLOCKS = ArithmeticModel(scaled_block=128)
NARROW_IN_BLOCKS = ArithmeticModel(accumulator_bits=9, scaled_block=128)


def is_certain(row, arithmetic, *, has_scales):
    """Of the sum of a row's values, in one scale block."""
    value = torch.tensor([row], dtype=torch.float64)
    everywhere = torch.ones_like(value, dtype=torch.bool)
    rows = CertainRows.stored(value, everywhere)
    if has_scales:
        nothing = value.new_zeros(1, 1)
        rows = CertainRows(
            codes=value, scale=nothing + 1, value=value, is_certain=everywhere, slack=nothing
        )
    ones = torch.ones_like(value)
    weights = NominalMatrix.of(ones, ones, ScaleFormat.NONE)
    found = stored_product(rows, weights, Stage.GEMM1, arithmetic, Conditions())
    return bool(found.is_certain)


@pytest.mark.parametrize(
    ("row", "arithmetic", "has_scales", "certain"),
    [
        pytest.param((2.0**14, 1, -(2.0**14)), CUT, False, False, id="cut off, no scales"),
        pytest.param((2.0**14, 1, -(2.0**14)), FP32, False, True, id="rounded, no scales"),
        pytest.param((2.0**12, 1, -(2.0**12)), CUT, False, False, id="one bit less: too many"),
        pytest.param((2.0**11, 1, -(2.0**11)), CUT, False, True, id="one bit less: as many"),
        pytest.param((2.0**12, 1, -(2.0**12)), CUT_IN_BLOCKS, True, False, id="cut off, scales"),
        pytest.param((2.0**23, 1), FP32_IN_BLOCKS, True, True, id="a rounded sum keeps its last"),
        pytest.param((2.0**23, 2.0**23), FP32, False, True, id="as many quanta as 2^24"),
        pytest.param((2.0**23, 2.0**23 - 1, 1), FP32, False, True, id="as many odd ones"),
        pytest.param((2.0**23, 2.0**23, 1, -1), FP32, False, False, id="more than 2^24"),
        pytest.param((1.0,), FP32_IN_BLOCKS, True, True, id="noise of an fp32 sum"),
        pytest.param((1.0,), NARROW_IN_BLOCKS, True, False, id="noise of a sum of 9 bits"),
    ],
)
def test_a_sum_is_certain_up_to_the_declared_bits(row, arithmetic, has_scales, certain):
    assert is_certain(row, arithmetic, has_scales=has_scales) is certain


SILU = GatedActivation()


def activation(gate, stores):
    """Of a gate beside an ``up`` of 1: what the certificate knows of the result."""
    gate_up = torch.tensor([[gate, 1.0]], dtype=torch.float64)
    known = Certain(gate_up, torch.ones_like(gate_up, dtype=torch.bool))
    return activated(known, SILU, stores, FP32)


@pytest.mark.parametrize(
    ("gate", "certain"),
    [
        pytest.param(-200.0, True, id="closed"),
        pytest.param(-99.0, True, id="closed, and too small for bf16"),
        pytest.param(-92.0, False, id="0 in fp32, a subnormal bf16 in float64"),
        pytest.param(-89.0, False, id="the same, above bf16's subnormals"),
        pytest.param(-8.0, True, id="open, and far from a boundary"),
        pytest.param(8192.0, True, id="wide open"),
    ],
)
def test_a_gate_is_certain_where_fp32_and_float64_store_one_value(gate, certain):
    assert bool(activation(gate, Stores.PRODUCT).is_certain) is certain


def test_a_gate_whose_exp_just_does_not_overflow_is_no_zero():
    """exp(88.7) is 3.3e38: fp32 holds it."""
    kept = activation(-88.7, Stores.NOTHING)
    assert kept.value.item() != 0
    assert activation(-200.0, Stores.NOTHING).value.item() == 0


def rows_of(values, relative):
    value = torch.tensor([values], dtype=torch.float64)
    source = Source(
        value=value,
        noise=relative * value.abs(),
        is_certain=torch.ones_like(value, dtype=torch.bool),
    )
    return quantised(source, ScaleForm(ScaleFormat.FP32, len(values)), FP32)


def test_noise_of_code_and_amax_moves_a_code_by_more_than_their_sum():
    """1 % up over 1 % down is 2.02 %: enough from here to 8.5, where codes around 8 part."""
    assert not bool(rows_of((448.0, 8.5 / 1.0201), 0.01).is_certain.any())
    assert bool(rows_of((448.0, 8.5 / 1.0203), 0.01).is_certain.all())


@pytest.mark.parametrize("relative", [1.0, 3.0])
def test_a_group_whose_noise_is_as_large_as_it_is_spoilt(relative):
    assert not bool(rows_of((448.0, 0.0, 8.0), relative).is_certain.any())


def test_a_scale_may_be_off_by_a_reciprocal_a_product_and_an_ulp():
    assert rows_of((448.0, 8.0), 0.0).slack.item() == pytest.approx(4 * 2.0**-24, rel=1e-6)
