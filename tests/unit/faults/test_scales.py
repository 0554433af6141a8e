"""A scale's arithmetic goes wrong: each fault against numbers worked out by hand."""

from dataclasses import replace

import pytest
import torch

from moe.faults.scales import (
    amax_floor_dropped,
    low_latency_scales_rounded_up,
    pack_mantissa_leak,
    pack_mantissa_leak_2d,
    pow2_log2_inexact,
    scale_inverted,
    scales_rounded_up_late,
)
from moe.quant.ue8m0 import pack_ue8m0
from moe.weights import ExpertMatrix
from tests.unit.faults.scaled_values import (
    activated,
    bytes_of,
    codes,
    packed_weights,
    quantised_slabs,
    seen,
    weights_of,
    words,
)
from tests.unit.faults.values import context, permuted, received_v2, slabs

FP32_WEIGHTS = weights_of(ExpertMatrix(values=codes(((1.0,),)), scale=torch.ones(1, 1, 1)))
BF16_WEIGHTS = weights_of(ExpertMatrix(values=torch.zeros(1, 1, 1), scale=None))


def rows_of(*live, dtype=torch.float32):
    """Four rows, of which 0 and 2 are these."""
    return torch.tensor([live[0], [1.0] * 4, live[1], [1.0] * 4]).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_codes_are_those_of_the_largest_magnitude_itself(dtype):
    """3 * 448 / 3 and -1.5 * 448 / 3, where the stored 2^-7 calls for 384 and -192."""
    source = rows_of([3.0, -1.5, 0.0, 0.0], [0.0, 0.0, 0.0, 7.0], dtype=dtype)
    middle = activated(words((120,), (1,), (121,), (1,)), source)
    late = scales_rounded_up_late(middle, context(seen()))
    assert late.hidden_states.to(torch.float32).tolist() == [
        [448.0, -224.0, 0.0, 0.0],
        [1.0] * 4,
        [0.0, 0.0, 0.0, 448.0],
        [1.0] * 4,
    ]
    assert late.hidden_states_scale is middle.hidden_states_scale


def test_each_group_has_a_largest_magnitude_of_its_own():
    source = rows_of([1.0, 0.5, 4.0, 1.0], [0.0] * 4)
    late = scales_rounded_up_late(activated(words(*[(120, 120)] * 4), source), context(seen()))
    assert late.hidden_states[0].to(torch.float32).tolist() == [448.0, 224.0, 448.0, 112.0]


FAULTS_OF_PACKED_ROWS = (scales_rounded_up_late, pack_mantissa_leak)


@pytest.mark.parametrize("fault", FAULTS_OF_PACKED_ROWS, ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("scale", [None, torch.ones(4, 1)], ids=["none", "fp32"])
def test_scales_that_are_not_packed_are_neither_rounded_nor_packed(fault, scale):
    middle = activated(scale)
    assert fault(middle, context(seen())) is middle


def test_wire_scales_are_rounded_up_under_the_codes_of_the_wire():
    sent = replace(slabs((2, 1)), hidden_states_scale=torch.full((2, 4, 1), 1.5))
    requantised = quantised_slabs(pack_ue8m0(torch.full((2, 4, 1), 7, dtype=torch.uint8)))
    rows = low_latency_scales_rounded_up(requantised, context(seen(sent))).rows
    assert bytes_of(rows.hidden_states_scale)[0] == [[128, 0, 0, 0]] * 2 + [[7, 0, 0, 0]] * 2
    assert rows.hidden_states[0].tolist() == [[0.0, 1.0], [2.0, 3.0], [0.0, 0.0], [0.0, 0.0]]
    assert rows.hidden_states[1].tolist() == [[8.0, 9.0]] + [[0.0, 0.0]] * 3


@pytest.mark.parametrize(
    ("sent", "scale"),
    [
        (slabs(), torch.ones(2, 4, 1)),
        (received_v2(), pack_ue8m0(torch.ones(2, 4, 1, dtype=torch.uint8))),
        (
            replace(slabs(), hidden_states_scale=torch.ones(2, 4, 1, dtype=torch.int32)),
            pack_ue8m0(torch.ones(2, 4, 1, dtype=torch.uint8)),
        ),
        (
            replace(slabs(), hidden_states_scale=None),
            pack_ue8m0(torch.ones(2, 4, 1, dtype=torch.uint8)),
        ),
    ],
    ids=["fp32 in front of the GEMM", "another wire", "packed wire", "bf16 wire"],
)
def test_only_fp32_scales_of_a_low_latency_wire_are_rounded_up(sent, scale):
    rows = quantised_slabs(scale)
    assert low_latency_scales_rounded_up(rows, context(seen(sent))) is rows


@pytest.mark.parametrize(
    ("amax", "packed"),
    [
        ((448.0, 448.0, 448.0, 448.0), [127, 127, 127, 127]),
        ((448.0, 672.0, 448.0, 448.0), [255, 127, 127, 127]),
        ((448.0, 448.0, 448.0, 672.0), [127, 127, 255, 127]),
        ((672.0, 448.0, 448.0, 448.0), [127, 127, 127, 127]),
    ],
    ids=["powers of two", "second", "fourth", "first"],
)
def test_the_mantissa_of_a_scale_runs_into_the_byte_below(amax, packed):
    """672 / 448 is 1.5: the exponent 127 and one bit of a mantissa."""
    source = rows_of(list(amax), [0.0] * 4)
    middle = activated(words(*[(9, 9, 9, 9)] * 4), source)
    leaked = pack_mantissa_leak(middle, context(seen())).hidden_states_scale
    assert bytes_of(leaked)[0] == packed
    assert bytes_of(leaked)[1] == [9, 9, 9, 9]


def test_the_mantissa_of_a_block_runs_into_the_byte_below():
    """The second block's 352 / 448 is 1.57 * 2^-1: bits 0x92 below the exponent 126."""
    largest = torch.tensor([224.0, 352.0, 448.0, 448.0]).repeat_interleave(128)
    values = torch.stack([largest, torch.zeros(512)])[None].to(torch.float8_e4m3fn)
    scale = pack_ue8m0(torch.full((1, 2, 4), 127, dtype=torch.uint8))
    weights = weights_of(ExpertMatrix(values=values, scale=scale))
    leaked = pack_mantissa_leak_2d(weights, context()).experts
    assert bytes_of(leaked.w13.scale) == [[[126 | 0x92, 126, 127, 127]] * 2]
    assert bytes_of(leaked.w2.scale) == bytes_of(leaked.w13.scale)


def test_block_scales_land_one_exponent_higher():
    weights = packed_weights((100, 110, 120, 121, 122), (1, 2, 3, 4, 5), group_size=128)
    raised = pow2_log2_inexact(weights, context()).experts.w2
    assert bytes_of(raised.scale)[0] == [
        [101, 111, 121, 122, 123, 0, 0, 0],
        [2, 3, 4, 5, 6, 0, 0, 0],
    ]
    assert raised.scale.stride() == weights.experts.w2.scale.stride()


@pytest.mark.parametrize(
    "weights",
    [packed_weights((100,)), FP32_WEIGHTS, BF16_WEIGHTS],
    ids=["bytes of a checkpoint", "fp32", "bf16"],
)
@pytest.mark.parametrize(
    "fault", [pack_mantissa_leak_2d, pow2_log2_inexact], ids=lambda fault: fault.__name__
)
def test_scales_that_are_not_computed_and_packed_at_load_time_stay(fault, weights):
    assert fault(weights, context()) is weights


@pytest.mark.parametrize(
    "scale", [torch.ones(3, 1), words((85,), (85,), (85,))], ids=["fp32", "packed"]
)
def test_a_row_of_zeros_has_the_scale_0_and_the_largest_code(scale):
    rows = codes((1.0, 0.0), (0.0, 0.0), (0.0, 2.0))
    sent = replace(received_v2(), hidden_states=rows, hidden_states_scale=scale)
    wrong = amax_floor_dropped(sent, context())
    assert wrong.hidden_states.to(torch.float32).tolist() == [[1.0, 0.0], [448.0] * 2, [0.0, 2.0]]
    same = wrong.hidden_states_scale == scale
    assert same.flatten().tolist() == [True, False, True]
    assert int(wrong.hidden_states_scale[1]) == 0


@pytest.mark.parametrize("scale", [None, torch.ones(3, 1)], ids=["bf16", "no row of zeros"])
def test_without_a_row_of_zeros_no_floor_is_missed(scale):
    rows = codes((1.0, 0.0), (1.0, 0.0), (0.0, 2.0))
    sent = replace(received_v2(), hidden_states=rows, hidden_states_scale=scale)
    assert amax_floor_dropped(sent, context()) is sent


def test_fp32_scales_of_live_rows_are_inverted():
    wrong = scale_inverted(permuted(scale=torch.tensor([[2.0], [4.0], [0.25], [8.0]])), context())
    assert wrong.rows.hidden_states_scale.flatten().tolist() == [0.5, 4.0, 4.0, 8.0]


def test_packed_scales_are_inverted_and_spare_bytes_stay_zero():
    middle = activated(words((120, 127), (9, 9), (130, 121), (9, 9)))
    wrong = scale_inverted(middle, context(seen())).hidden_states_scale
    assert bytes_of(wrong)[0] == [134, 127, 0, 0]
    assert bytes_of(wrong)[2] == [124, 133, 0, 0]
    assert bytes_of(wrong)[1] == [9, 9, 0, 0]


def test_without_scales_none_are_inverted():
    middle = activated(None)
    assert scale_inverted(middle, context(seen())) is middle
