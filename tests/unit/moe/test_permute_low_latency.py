"""Slabs go to the experts and back as they are."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from moe.dispatched import LowLatencyDispatchOutput, LowLatencyHandle
from moe.formats import DispatchFormat, GemmLayout, RunnerBackend, ScaleFormat
from moe.golden import decode_e4m3, unpack_ue8m0
from moe.permute import PermuteContext, permute_pair
from moe.permute.low_latency import post_permute, pre_permute
from moe.quant.fp8 import group_scales, quantize_groups, requantize_groups, round_to_e4m3
from moe.stages import Gemm2Output, MaskedInput, PrePermuteOutput

# Two slabs of four rows with three and no real ones; what lies past them is NaN.
MASKED_M = torch.tensor([3, 0], dtype=torch.int32)
WEIGHTS = torch.tensor([[0.5, 0.25], [9.0, 2.0]])
CONTEXT = PermuteContext(
    num_local_experts=2,
    num_experts=4,
    layout=GemmLayout.MASKED,
    row_alignment=128,
    routed_scaling_factor=2.5,
    quantize=None,
)


def received(width: int = 256) -> LowLatencyDispatchOutput:
    """bf16 slabs; every cell of real row r of slab 0 is (r + 1) / 2^20, under the wire's floor."""
    hidden = torch.full((2, 4, width), torch.nan, dtype=torch.bfloat16)
    hidden[0, :3] = torch.arange(1.0, 4.0).to(torch.bfloat16)[:, None] * 2.0**-20
    nothing = torch.zeros((2, 1), dtype=torch.int32)
    return LowLatencyDispatchOutput(
        physical_ids=torch.zeros((2, 2), dtype=torch.int32),
        topk_weights=WEIGHTS,
        hidden_states=hidden,
        hidden_states_scale=None,
        masked_m=MASKED_M,
        expected_m=5,
        handle=LowLatencyHandle(topk_ids=nothing, source_row=nothing, begin=nothing, count=nothing),
    )


def of_codes() -> LowLatencyDispatchOutput:
    codes = torch.ones((2, 4, 128)).to(torch.float8_e4m3fn)
    return replace(received(), hidden_states=codes, hidden_states_scale=torch.ones((2, 4, 1)))


def quantized(scale_format: ScaleFormat) -> PrePermuteOutput:
    quantize = partial(quantize_groups, scale_format=scale_format)
    return pre_permute(received(), replace(CONTEXT, quantize=quantize))


@pytest.mark.parametrize("make", [received, of_codes], ids=["bf16", "codes"])
def test_slabs_go_on_as_they_came_without_a_copy(make):
    sent = make()
    rows = pre_permute(sent, CONTEXT).rows
    assert rows.hidden_states is sent.hidden_states
    assert rows.hidden_states_scale is sent.hidden_states_scale
    assert rows.masked_m is sent.masked_m


def test_codes_are_not_quantised_again():
    def quantize(rows):
        raise ValueError("codes went through the quantiser of bf16 rows")

    with pytest.raises(AssertionError, match="these rows are quantised already"):
        pre_permute(of_codes(), replace(CONTEXT, quantize=quantize))


def requantized(scale_format: ScaleFormat, codes: torch.Tensor, scale: torch.Tensor) -> MaskedInput:
    """Three real rows of codes [3, 256] and fp32 scales [3, 2] that the GEMMs cannot read."""
    sent = received()
    slabs = torch.full((2, 4, 256), torch.nan).to(torch.float8_e4m3fn)
    slabs[0, :3] = codes.to(torch.float8_e4m3fn)
    scales = torch.full((2, 4, 2), torch.nan)
    scales[0, :3] = scale
    sent = replace(sent, hidden_states=slabs, hidden_states_scale=scales)
    requantize = partial(requantize_groups, scale_format=scale_format)
    return pre_permute(sent, replace(CONTEXT, requantize=requantize)).rows


def test_codes_whose_scales_the_gemms_cannot_read_are_quantised_again():
    # 448 * 0.3 = 134.4 wants a scale of 0.5; over it 268.8, between the codes 256 and 288.
    codes = torch.tensor([448.0, 1.0] + [0.0] * 126).repeat(3, 2)
    rows = requantized(ScaleFormat.UE8M0, codes, torch.tensor([[0.3, 0.25]]).repeat(3, 1))
    assert group_scales(rows.hidden_states_scale[0, :3], 2).tolist() == [[0.5, 0.25]] * 3
    first, second = rows.hidden_states[0, 0].to(torch.float32).view(2, 128)[:, :2].tolist()
    # 0.3 / 0.5 = 0.6 lies between the codes 0.5625 and 0.625.
    assert (first, second) == ([256.0, 0.625], [448.0, 1.0])


def test_quantising_again_rounds_values_once_and_inflates_none():
    generator = torch.Generator().manual_seed(9)
    codes = round_to_e4m3(torch.randn(3, 256, generator=generator) * 100).to(torch.float32)
    codes[:, ::128] = 448.0
    scale = torch.tensor([[0.3, 0.6], [0.51, 0.9], [0.13, 0.26]])
    rows = requantized(ScaleFormat.UE8M0, codes, scale)
    before = codes.view(3, 2, 128).double() * scale[..., None]
    powers = unpack_ue8m0(rows.hidden_states_scale[0, :3], 2)[..., None]
    after = decode_e4m3(rows.hidden_states[0, :3].view(torch.uint8)).view(3, 2, 128) * powers
    # Half a step of the normal codes relative to the value, of the subnormal ones to the scale.
    assert bool(((after - before).abs() <= (before.abs() * 2.0**-4 + powers * 2.0**-10)).all())
    # Rounding the scales up alone would make the first group 1.67 times as large.
    assert powers.flatten().tolist() == [0.5, 1.0, 1.0, 1.0, 0.25, 0.5]


def test_quantised_again_rows_past_the_count_are_poison():
    rows = requantized(ScaleFormat.UE8M0, torch.ones(3, 256), torch.ones(3, 2))
    past = [rows.hidden_states[0, 3:], rows.hidden_states[1]]
    assert all(bool(part.to(torch.float32).isnan().all()) for part in past)


def test_a_bf16_wire_needs_a_quantiser_of_bf16_rows():
    requantize = partial(requantize_groups, scale_format=ScaleFormat.UE8M0)
    with pytest.raises(AssertionError, match="only a recipe with scales quantises"):
        pre_permute(received(), replace(CONTEXT, requantize=requantize))


def test_the_hint_goes_on():
    assert pre_permute(received(), CONTEXT).rows.expected_m == 5


@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_behind_a_bf16_wire_real_rows_are_quantised_by_the_usual_rule(scale_format):
    # (r + 1) / 2^20 is scaled to 448, or for powers of two to the largest code under it.
    rows = quantized(scale_format).rows
    codes = rows.hidden_states[0, :3].to(torch.float32)
    scale = group_scales(rows.hidden_states_scale[0, :3], 2)
    largest = [448.0] * 3 if scale_format is ScaleFormat.FP32 else [256.0, 256.0, 384.0]
    assert codes[:, 0].tolist() == largest
    assert (codes[:, 0] * scale[:, 0] * 2**20).tolist() == pytest.approx([1.0, 2.0, 3.0], rel=1e-6)


@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_behind_a_bf16_wire_rows_past_the_count_are_poison(scale_format):
    rows = quantized(scale_format).rows
    past = [rows.hidden_states[0, 3:], rows.hidden_states[1]]
    assert all(bool(part.to(torch.float32).isnan().all()) for part in past)


def test_packed_scales_of_slabs_are_mn_major():
    scale = quantized(ScaleFormat.UE8M0).rows.hidden_states_scale
    assert (scale.shape, scale.stride()) == ((2, 4, 1), (4, 1, 4))


def test_a_slab_without_a_row_quantises_to_poison():
    quantize = partial(quantize_groups, scale_format=ScaleFormat.FP32)
    empty = replace(received(), masked_m=torch.zeros(2, dtype=torch.int32))
    rows = pre_permute(empty, replace(CONTEXT, quantize=quantize)).rows
    assert bool(rows.hidden_states.to(torch.float32).isnan().all())


def test_expert_outputs_go_back_as_they_are_and_weights_with_them():
    restore = pre_permute(received(), CONTEXT).restore
    output = torch.ones((2, 4, 256), dtype=torch.bfloat16)
    back = post_permute(Gemm2Output(output=output), restore, CONTEXT)
    assert back.partial is output
    assert back.pending_weights is WEIGHTS


def test_the_given_slabs_are_not_written_into():
    sent = received()
    quantize = partial(quantize_groups, scale_format=ScaleFormat.FP32)
    pre_permute(sent, replace(CONTEXT, quantize=quantize))
    assert sent.hidden_states._version == received().hidden_states._version


@pytest.mark.parametrize("name", [fmt for fmt in DispatchFormat if fmt.is_low_latency])
def test_every_format_of_the_family_has_the_pair(name):
    pair = permute_pair(name, RunnerBackend.DEEP_GEMM)
    assert (pair.pre, pair.post) == (pre_permute, post_permute)
