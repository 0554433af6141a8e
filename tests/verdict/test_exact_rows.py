"""Which stored products have one answer, by what a backend declares."""

import pytest
import torch

from moe.arithmetic import ArithmeticModel
from moe.formats import ScaleFormat, Stage
from reports.verdict.exact_rows import CertainRows, stored_product
from reports.verdict.exact_sums import Conditions
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
    weights = NominalMatrix(ones, ones, ScaleFormat.NONE)
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
