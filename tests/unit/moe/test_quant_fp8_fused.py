"""The quantiser fused with the masked activation: fp32 in, divisions where others multiply."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from moe.formats import ScaleFormat
from moe.quant.fp8 import group_scales, quantize_groups, quantize_groups_fused

FORMATS = pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])


def row(*values: float) -> torch.Tensor:
    """[1, 128] fp32, zero behind the given values."""
    return torch.nn.functional.pad(torch.tensor([values]), (0, 128 - len(values)))


@FORMATS
def test_codes_and_scales_are_those_of_numpy_in_float32(scale_format):
    rows = torch.randn(32, 256, generator=torch.Generator().manual_seed(6)) * 3
    groups = rows.numpy().reshape(32, 2, 128)
    scale = np.maximum(abs(groups).max(-1), np.float32(1e-10)) / np.float32(448)
    if scale_format is ScaleFormat.UE8M0:
        scale = np.vectorize(lambda s: 2.0 ** math.ceil(math.log2(s)))(scale).astype(np.float32)
    codes = (groups * (np.float32(1) / scale)[..., None]).astype(ml_dtypes.float8_e4m3fn)
    got = quantize_groups_fused(rows, scale_format)
    assert group_scales(got.scale, 2).numpy().tolist() == scale.tolist()
    assert got.values.view(torch.uint8).numpy().tolist() == (
        codes.reshape(32, 256).view(np.uint8).tolist()
    )


def test_a_value_that_bf16_would_move_to_another_code_keeps_its_own():
    # The scale is 1. Between the codes 16 and 18, 17 is a tie that goes to 16; so does 17.01
    # once bf16 has made it 17, but not by itself.
    rows = row(448.0, 17.01)
    fused = quantize_groups_fused(rows, ScaleFormat.UE8M0)
    through_bf16 = quantize_groups(rows.to(torch.bfloat16), ScaleFormat.UE8M0)
    assert fused.values[0, :2].float().tolist() == [448.0, 18.0]
    assert through_bf16.values[0, :2].float().tolist() == [448.0, 16.0]


def test_an_fp32_multiplier_is_the_reciprocal_of_the_scale():
    # Times 1 / scale the second value is 17, a tie that goes to 16; times 448 / amax it would be
    # 17.000002, which goes to 18.
    rows = row(1.03125, float.fromhex("0x1.40924ap-5"))
    assert quantize_groups_fused(rows, ScaleFormat.FP32).values[0, 1].float().item() == 16.0
    assert quantize_groups(rows, ScaleFormat.FP32).values[0, 1].float().item() == 18.0


@pytest.mark.parametrize(
    ("largest", "scale"), [(448.0, 1.0), (449.0, 2.0), (224.0, 0.5), (1.0, 2.0**-8)]
)
def test_a_ue8m0_scale_is_rounded_up(largest, scale):
    quantized = quantize_groups_fused(row(largest), ScaleFormat.UE8M0)
    assert group_scales(quantized.scale, 1).tolist() == [[scale]]


@FORMATS
def test_a_group_of_zeros_has_the_scale_of_1e_10(scale_format):
    quantized = quantize_groups_fused(row(0.0), scale_format)
    assert quantized.values.float().count_nonzero() == 0
    scale = group_scales(quantized.scale, 1).item()
    # 1e-10 / 448 is 2.232e-13, the next power of two 2^-42 = 2.274e-13.
    expected = 2.0**-42 if scale_format is ScaleFormat.UE8M0 else 1e-10 / 448
    assert scale == pytest.approx(expected, rel=1e-6)


@FORMATS
def test_scales_lie_as_those_of_the_other_quantiser(scale_format):
    rows = torch.ones(6, 256)
    fused, plain = quantize_groups_fused(rows, scale_format), quantize_groups(rows, scale_format)
    assert (fused.scale.shape, fused.scale.stride()) == (plain.scale.shape, plain.scale.stride())


@FORMATS
def test_no_rows_make_no_rows(scale_format):
    assert quantize_groups_fused(torch.zeros(0, 128), scale_format).values.shape == (0, 128)


def test_a_width_that_cuts_a_group_is_refused():
    with pytest.raises(ValueError, match="100 columns do not split into groups of 128"):
        quantize_groups_fused(torch.zeros(1, 100), ScaleFormat.FP32)
