"""Activations at the edges of their scales: the pipeline's quantisers against the golden's."""

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.golden import LOW_LATENCY_AMAX_FLOOR as GOLDEN_LOW_LATENCY_FLOOR
from moe.golden import Quantized, decode_e4m3, round_e4m3, unpack_ue8m0
from moe.golden import quantize_groups as golden_quantize
from moe.quant.fp8 import (
    LOW_LATENCY_AMAX_FLOOR,
    QuantizedRows,
    quantize_groups,
    quantize_groups_fused,
)

FP32, UE8M0 = ScaleFormat.FP32, ScaleFormat.UE8M0
FORMATS = pytest.mark.parametrize("scale_format", [FP32, UE8M0])
SIZES = pytest.mark.parametrize("group_size", [32, 128])
QUANTISERS = pytest.mark.parametrize(
    "quantize",
    [quantize_groups, quantize_groups_fused, partial(quantize_groups_fused, by_division=True)],
    ids=["stored", "fused", "fused-by-division"],
)


def next_bf16(value: float, steps: int) -> float:
    """A bf16 number, or the one that many ulps beside it."""
    bits = torch.tensor(value, dtype=torch.bfloat16).view(torch.int16) + steps
    return bits.view(torch.bfloat16).item()


def next_fp32(value: float, towards: float) -> float:
    return float(np.nextafter(np.float32(value), np.float32(towards)))


def largest(amax: float, group_size: int) -> Tensor:
    """[1, 2 * group_size]: two groups, of whose magnitudes ``amax`` is the largest."""
    shares = torch.exp2(-torch.arange(2 * group_size) / 5.0)
    shares[[0, group_size]] = 1.0
    signs = torch.tensor([1.0, -1.0]).repeat(group_size)
    return (amax * shares * signs)[None]


def spread(group_size: int) -> Tensor:
    """[1, 2 * group_size] powers of two from 2^-20 to 2^20, of both signs, in each group."""
    powers = torch.exp2(torch.linspace(-20, 20, group_size).round())
    return torch.cat([powers, -powers])[None]


BF16_EDGES: dict[str, Callable[[int], Tensor]] = {
    **{
        f"448*2^{k}{steps:+d}ulp": partial(largest, next_bf16(448 * 2.0**k, steps))
        for k in (-40, 0, 20)
        for steps in (-1, 0, 1)
    },
    **{f"1{steps:+d}ulp": partial(largest, next_bf16(1.0, steps)) for steps in (-1, 0, 1)},
    "spread": spread,
    "zeros": lambda size: torch.zeros(3, 2 * size),
    "1e-38": lambda size: torch.full((1, 2 * size), 1e-38),
}
FP32_EDGES: dict[str, float] = {
    f"{floor:g}-{place}": value
    for floor in (1e-10, 1e-4)
    for place, value in (
        ("at", float(np.float32(floor))),
        ("above", next_fp32(floor, math.inf)),
        ("below", next_fp32(floor, 0.0)),
    )
}


def scales_of(got: QuantizedRows, num_groups: int) -> Tensor:
    if got.scale.dtype == torch.int32:
        return unpack_ue8m0(got.scale, num_groups)
    return got.scale.double()


def assert_same(
    got: QuantizedRows, expected: Quantized, scale_format: ScaleFormat, noise: float = 0.0
) -> None:
    """Equal codes, and equal scales: fp32 ones may be a float32 apart, as the golden says.

    With ``noise`` a code may be the other one of a tie, where the ratio is relatively that close.
    """
    codes, scaled = decode_e4m3(got.values.view(torch.uint8)), expected.scaled
    lowest, highest = (round_e4m3(scaled + sign * noise * scaled.abs()) for sign in (-1, 1))
    assert bool(((lowest <= codes) & (codes <= highest)).all())
    scale = scales_of(got, expected.scale.shape[1]).numpy().astype(np.float32)
    ulps = 1 if scale_format is FP32 else 0
    np.testing.assert_array_max_ulp(scale, expected.scale.numpy().astype(np.float32), maxulp=ulps)


def reciprocal_noise(quantize: Callable, scale_format: ScaleFormat) -> float:
    """Kernels fused with an activation multiply by the reciprocal of a rounded fp32 scale."""
    stored = quantize is quantize_groups
    return 0.0 if stored or scale_format is UE8M0 else 2.0**-22


@FORMATS
@SIZES
@QUANTISERS
@pytest.mark.parametrize("name", BF16_EDGES)
def test_bf16_rows_at_an_edge_are_quantised_as_by_the_golden(
    name, quantize, group_size, scale_format
):
    rows = BF16_EDGES[name](group_size).to(torch.bfloat16)
    got = quantize(rows, scale_format, group_size=group_size)
    expected = golden_quantize(rows.double(), scale_format, group_size)
    assert_same(got, expected, scale_format, reciprocal_noise(quantize, scale_format))


@FORMATS
@SIZES
@QUANTISERS
@pytest.mark.parametrize("name", FP32_EDGES)
def test_a_magnitude_around_a_floor_is_quantised_as_by_the_golden(
    name, quantize, group_size, scale_format
):
    rows = torch.full((1, 2 * group_size), FP32_EDGES[name])
    got = quantize(rows, scale_format, group_size=group_size)
    expected = golden_quantize(rows.double(), scale_format, group_size)
    assert_same(got, expected, scale_format, reciprocal_noise(quantize, scale_format))


@FORMATS
@SIZES
@pytest.mark.parametrize("name", FP32_EDGES)
def test_a_magnitude_around_the_floor_of_the_wire_is_quantised_as_by_the_golden(
    name, group_size, scale_format
):
    rows = torch.full((1, 2 * group_size), FP32_EDGES[name])
    got = quantize_groups(
        rows, scale_format, group_size=group_size, amax_floor=LOW_LATENCY_AMAX_FLOOR
    )
    expected = golden_quantize(rows.double(), scale_format, group_size, GOLDEN_LOW_LATENCY_FLOOR)
    assert_same(got, expected, scale_format)


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        (next_bf16(448.0, -1), 1.0),
        (448.0, 1.0),
        (next_bf16(448.0, 1), 2.0),
        (224.0, 0.5),
        (0.0, 2.0**-42),
        (1e-38, 2.0**-42),
        (float(np.float32(1e-10)), 2.0**-42),
        (2.0**-33, 2.0**-41),
    ],
)
@SIZES
@QUANTISERS
def test_a_ue8m0_scale_at_an_edge_is_the_written_one(quantize, amax, scale, group_size):
    got = quantize(torch.full((1, group_size), amax), UE8M0, group_size=group_size)
    assert scales_of(got, 1).tolist() == [[scale]]


@pytest.mark.parametrize(
    ("amax", "scale"), [(1e-5, 2.0**-22), (float(np.float32(1e-4)), 2.0**-22), (2e-4, 2.0**-21)]
)
def test_the_wire_scales_no_group_for_less_than_its_floor(amax, scale):
    rows = torch.full((1, 128), amax)
    got = quantize_groups(rows, UE8M0, amax_floor=LOW_LATENCY_AMAX_FLOOR)
    assert scales_of(got, 1).tolist() == [[scale]]


@FORMATS
@SIZES
@QUANTISERS
def test_every_scale_is_found_at_its_own_place(quantize, group_size, scale_format):
    """Seven rows of five groups whose scales are 2^-17, 2^-16, ... 2^17, one after the other."""
    scales = torch.exp2(torch.arange(-17, 18).to(torch.float64)).view(7, 5)
    rows = (448 * scales).repeat_interleave(group_size, dim=1).to(torch.bfloat16)
    got = quantize(rows, scale_format, group_size=group_size)
    assert torch.equal(scales_of(got, 5), scales)
    assert got.values.float().unique().tolist() == [448.0]
