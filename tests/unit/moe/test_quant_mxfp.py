"""Groups of 32 columns with power-of-two scales, against the golden model and literals."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from moe.golden import Quantized, quantize_mxfp4_weight, quantize_mxfp8_weight
from moe.quant.e2m1 import unpacked_e2m1_to_fp32
from moe.quant.fp8 import e4m3_to_fp32
from moe.quant.mxfp import dequantize_mx, quantize_mxfp4, quantize_mxfp8
from moe.quant.ue8m0 import scale_from_exponent


@dataclass(frozen=True)
class Mx:
    """One quantiser of the pipeline and of the golden model, and its largest code."""

    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    golden: Callable[[torch.Tensor], Quantized]
    decode: Callable[[torch.Tensor], torch.Tensor]
    largest: float


MX = {
    "mxfp8": Mx(quantize_mxfp8, quantize_mxfp8_weight, e4m3_to_fp32, 448.0),
    "mxfp4": Mx(quantize_mxfp4, quantize_mxfp4_weight, unpacked_e2m1_to_fp32, 6.0),
}
BOTH = pytest.mark.parametrize("recipe", MX)


def drawn(*shape: int, seed: int = 11) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def group(*values: float) -> torch.Tensor:
    """[1, 32] fp32, zero behind the given values."""
    return torch.nn.functional.pad(torch.tensor([values]), (0, 32 - len(values)))


def beside(value: float, towards: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(towards)))


def groups_of_largest(amaxes: list[float]) -> torch.Tensor:
    """[1, 32 * groups] fp32: random groups, the largest of each exactly as given."""
    shares = drawn(len(amaxes), 32).clamp(-2, 2) / 2.5
    shares[:, 5] = -1.0
    return (shares * torch.tensor(amaxes)[:, None]).view(1, -1)


POWERS = [2.0**k for k in (-130, -126, -100, -20, -1, 0, 1, 9, 100)]
ROWS: dict[str, Callable[[float], torch.Tensor]] = {
    "random": lambda _: drawn(8, 128),
    "random-bf16": lambda _: drawn(8, 128, seed=12).to(torch.bfloat16),
    "exact-powers": lambda top: groups_of_largest([top * p for p in POWERS]),
    "above-powers": lambda top: groups_of_largest([beside(top * p, math.inf) for p in POWERS]),
    "below-powers": lambda top: groups_of_largest([beside(top * p, 0.0) for p in POWERS]),
    "zeros": lambda _: torch.tensor([[0.0] * 32 + [-0.0] * 32]),
    "1e-38": lambda _: torch.full((1, 32), 1e-38),
    "subnormal": lambda _: torch.arange(1, 321).view(1, 320) * 2.0**-149,
    "range-2^40": lambda _: groups_of_largest([2.0**k for k in range(-20, 21)]),
    "range-2^40-in-a-group": lambda _: torch.exp2(torch.linspace(-20, 20, 32))[None],
    "largest-float": lambda _: torch.full((1, 32), torch.finfo(torch.float32).max),
}


def assert_same_bits(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(got.to(torch.float64).view(torch.int64), expected.view(torch.int64))


@BOTH
@pytest.mark.parametrize("rows", ROWS)
def test_codes_are_those_of_the_golden_model(recipe, rows):
    mx, matrix = MX[recipe], ROWS[rows](MX[recipe].largest)
    assert_same_bits(mx.decode(mx.quantize(matrix)[0]), mx.golden(matrix.double()).codes)


@BOTH
@pytest.mark.parametrize("rows", ROWS)
def test_scales_are_those_of_the_golden_model(recipe, rows):
    mx, matrix = MX[recipe], ROWS[rows](MX[recipe].largest)
    got = scale_from_exponent(mx.quantize(matrix)[1])
    assert_same_bits(got, mx.golden(matrix.double()).scale)


@pytest.mark.parametrize(
    ("recipe", "amax", "byte"),
    [
        ("mxfp8", 448.0, 127),
        ("mxfp8", 448.00003, 128),
        ("mxfp8", 447.99997, 127),
        ("mxfp8", 224.0, 126),
        ("mxfp8", 0.0, 0),
        ("mxfp8", 1e-38, 1),
        ("mxfp4", 6.0, 127),
        ("mxfp4", 6.0000005, 128),
        ("mxfp4", 5.9999995, 127),
        ("mxfp4", 3.0, 126),
        ("mxfp4", 0.0, 0),
        ("mxfp4", 1e-38, 1),
    ],
)
def test_the_byte_of_a_group_is_its_scale_rounded_up(recipe, amax, byte):
    assert MX[recipe].quantize(group(1e-45, -amax))[1].tolist() == [[byte]]


@pytest.mark.parametrize(("recipe", "last"), [("mxfp8", 224), ("mxfp4", 3)], ids=["mxfp8", "mxfp4"])
def test_a_group_whose_quotient_is_no_fp32_number_counts_as_zeros(recipe, last):
    # last / largest is 2^-1 in units of the least subnormal: a tie that goes to zero.
    amaxes = torch.tensor([[last], [last + 1]]) * 2.0**-149
    assert MX[recipe].quantize(amaxes.expand(2, 32))[1].tolist() == [[0], [1]]


def test_mxfp8_codes_are_the_values_over_the_scale():
    # Scale 2: 450 -> 225 -> 224; 17 -> 8.5, a tie that goes to the even 8.
    values, scale = quantize_mxfp8(group(450.0, 17.0, -1.0))
    assert (scale.item(), values[0, :3].float().tolist()) == (128, [224.0, 8.0, -0.5])


def test_mxfp4_codes_are_the_values_over_the_scale():
    # Scale 2: 7 -> 3.5, a tie that goes to 4 (code 6); -1 -> -0.5 (code 9); 3 -> 1.5 (code 3).
    packed, scale = quantize_mxfp4(group(7.0, -1.0, 3.0))
    assert (scale.item(), packed[0, :2].tolist()) == (128, [0x96, 0x03])


@BOTH
def test_matrices_of_a_batch_are_quantised_each_on_its_own(recipe):
    batch = drawn(2, 3, 64)
    together = MX[recipe].quantize(batch)
    for index in range(2):
        alone = MX[recipe].quantize(batch[index])
        assert torch.equal(together[0][index].view(torch.uint8), alone[0].view(torch.uint8))
        assert torch.equal(together[1][index], alone[1])


@BOTH
def test_a_transposed_matrix_is_quantised_along_its_own_rows(recipe):
    matrix = drawn(64, 32)
    got, expected = (MX[recipe].quantize(m) for m in (matrix.T, matrix.T.contiguous()))
    assert torch.equal(got[0].view(torch.uint8), expected[0].view(torch.uint8))


@BOTH
def test_columns_that_split_a_group_are_refused(recipe):
    with pytest.raises(ValueError, match="48 columns do not split into groups of 32"):
        MX[recipe].quantize(torch.zeros(1, 48))


@BOTH
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_matrix_that_is_not_finite_is_refused(recipe, value):
    with pytest.raises(ValueError, match="NaN or infinity"):
        MX[recipe].quantize(group(1.0, value))


@pytest.mark.parametrize("as_factors", [False, True], ids=["bytes", "fp32"])
def test_dequantising_mxfp8_multiplies_each_group_by_its_scale(as_factors):
    values = torch.tensor([[1.5] * 32 + [-2.0] * 32]).to(torch.float8_e4m3fn)
    scale = torch.tensor([[128, 124]], dtype=torch.uint8)
    if as_factors:
        scale = scale_from_exponent(scale)
    assert dequantize_mx(values, scale).tolist() == [[3.0] * 32 + [-0.25] * 32]


def test_dequantising_mxfp4_multiplies_each_group_by_its_scale():
    packed = torch.tensor([[0x21] * 16 + [0xF0] * 16], dtype=torch.uint8)
    scale = torch.tensor([[128, 124]], dtype=torch.uint8)
    assert dequantize_mx(packed, scale).tolist() == [[1.0, 2.0] * 16 + [0.0, -0.75] * 16]


def test_a_scale_for_128_columns_covers_them_all():
    values = torch.ones(1, 256).to(torch.float8_e4m3fn)
    scale = torch.tensor([[128, 126]], dtype=torch.uint8)
    assert dequantize_mx(values, scale).tolist() == [[2.0] * 128 + [0.5] * 128]
