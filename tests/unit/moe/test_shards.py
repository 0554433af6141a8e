"""Shards of the intermediate axis: they add up to the expert, scales and all."""

import pytest
import torch
from torch import Tensor

from moe.formats import ScaleFormat
from moe.golden import decode_e4m3, unpack_ue8m0
from moe.quant.fp8 import quantize_blocks
from moe.quant.ue8m0 import mn_major
from moe.shards import shard_experts
from moe.weights import ExpertMatrix, ExpertWeights, requantize_ue8m0

EXPERTS, HIDDEN, INTERMEDIATE = 2, 256, 768
FORMATS = pytest.mark.parametrize(
    "scale_format", [ScaleFormat.NONE, ScaleFormat.FP32, ScaleFormat.UE8M0]
)


def matrix(seed: int, n: int, k: int, scale_format: ScaleFormat) -> ExpertMatrix:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(EXPERTS, n, k, generator=generator)
    values *= torch.rand(EXPERTS, n, k, generator=generator).exp2()
    if scale_format is ScaleFormat.NONE:
        return ExpertMatrix(values=values.to(torch.bfloat16), scale=None)
    blocks = quantize_blocks(values, ScaleFormat.FP32)
    quantized = ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)
    return requantize_ue8m0(quantized) if scale_format is ScaleFormat.UE8M0 else quantized


def experts(scale_format: ScaleFormat) -> ExpertWeights:
    return ExpertWeights(
        w13=matrix(1, 2 * INTERMEDIATE, HIDDEN, scale_format),
        w2=matrix(2, HIDDEN, INTERMEDIATE, scale_format),
    )


def decoded(weight: ExpertMatrix) -> Tensor:
    """[L, N, K] float64 by the golden model's number formats."""
    if weight.scale is None:
        return weight.values.to(torch.float64)
    codes = decode_e4m3(weight.values.view(torch.uint8))
    n, k = codes.shape[1:]
    if weight.scale.dtype == torch.int32:
        by_row = unpack_ue8m0(weight.scale, -(-k // 128))
    else:
        by_row = weight.scale.to(torch.float64).repeat_interleave(128, dim=1)[:, :n]
    return codes * by_row.repeat_interleave(128, dim=2)[:, :, :k]


@FORMATS
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_a_shard_holds_its_gate_rows_then_its_up_rows(scale_format, count):
    whole = decoded(experts(scale_format).w13)
    width = INTERMEDIATE // count
    for index in range(count):
        start = index * width
        up = INTERMEDIATE + start
        expected = torch.cat([whole[:, start : start + width], whole[:, up : up + width]], dim=1)
        shard = shard_experts(experts(scale_format), index, count)
        assert torch.equal(decoded(shard.w13), expected)


@FORMATS
@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_a_shard_holds_its_columns_of_w2(scale_format, count):
    whole = decoded(experts(scale_format).w2)
    parts = [decoded(shard_experts(experts(scale_format), i, count).w2) for i in range(count)]
    assert torch.equal(torch.cat(parts, dim=2), whole)


@pytest.mark.parametrize("name", ["w13", "w2"])
def test_packed_scales_stay_mn_major(name):
    scale = getattr(shard_experts(experts(ScaleFormat.UE8M0), 1, 3), name).scale
    assert scale.stride() == mn_major(scale).stride()


@pytest.mark.parametrize("name", ["w13", "w2"])
@FORMATS
def test_values_are_row_major(scale_format, name):
    values = getattr(shard_experts(experts(scale_format), 1, 3), name).values
    assert values.is_contiguous()


def test_bf16_shards_may_have_any_width():
    weights = ExpertWeights(
        w13=ExpertMatrix(values=torch.arange(12.0).bfloat16().view(1, 12, 1), scale=None),
        w2=ExpertMatrix(values=torch.arange(6.0).bfloat16().view(1, 1, 6), scale=None),
    )
    shard = shard_experts(weights, 1, 3)
    assert shard.w13.values.flatten().tolist() == [2, 3, 8, 9]
    assert shard.w2.values.flatten().tolist() == [2, 3]


@FORMATS
def test_an_axis_that_does_not_divide_is_refused(scale_format):
    with pytest.raises(ValueError, match="an intermediate size of 768 does not divide by 5"):
        shard_experts(experts(scale_format), 0, 5)


@pytest.mark.parametrize("scale_format", [ScaleFormat.FP32, ScaleFormat.UE8M0])
def test_a_shard_that_cuts_a_quantised_block_is_refused(scale_format):
    with pytest.raises(ValueError, match="768 in 4 shards gives 192 columns each, no multiple"):
        shard_experts(experts(scale_format), 0, 4)


@pytest.mark.parametrize("index", [-1, 2])
def test_a_shard_that_does_not_exist_is_refused(index):
    with pytest.raises(ValueError, match=f"no shard {index} among 2"):
        shard_experts(experts(ScaleFormat.NONE), index, 2)
