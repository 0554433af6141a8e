"""Shards of the intermediate axis: they add up to the expert, scales and all."""

from functools import cache

import pytest
import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import decode_e4m3, unpack_ue8m0
from moe.quant.fp8 import quantize_blocks
from moe.quant.ue8m0 import mn_major
from moe.shards import shard_experts
from moe.weight_preparation import prepare_weights, requantize_ue8m0
from moe.weights import ExpertMatrix, ExpertWeights, LayerWeights
from reports.verdict.golden_matrix import stored_matrix
from tests.unit.moe.checkpoint_matrices import checkpoint_matrix

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


@cache
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


FP32, UE8M0 = ScaleFormat.FP32, ScaleFormat.UE8M0
FORMS = [
    (QuantRecipe.FP8_BLOCK128, FP32, 2),
    (QuantRecipe.FP8_BLOCK128, UE8M0, 2),
    (QuantRecipe.FP8_PER_TENSOR, FP32, 2),
    (QuantRecipe.FP8_PER_TENSOR, UE8M0, 2),
    (QuantRecipe.MXFP8, UE8M0, 2),
    (QuantRecipe.MXFP8, UE8M0, 8),
    (QuantRecipe.MXFP4_W4A8, UE8M0, 2),
    (QuantRecipe.MXFP4_W4A8, UE8M0, 8),
    (QuantRecipe.MXFP4_AS_FP8, FP32, 2),
    (QuantRecipe.MXFP4_AS_FP8, UE8M0, 2),
]
"""Recipe, scales of the GEMMs, shards of 256 columns."""


def checkpoint(recipe: QuantRecipe) -> ExpertWeights:
    return ExpertWeights(
        w13=checkpoint_matrix(recipe, 3, (2, 512, 128), (0.5, 0.25)),
        w2=checkpoint_matrix(recipe, 4, (2, 128, 256), (0.5,)),
    )


def prepared(weights: ExpertWeights, recipe: QuantRecipe, scales: ScaleFormat) -> ExpertWeights:
    layer = LayerWeights(
        expert_ids=torch.arange(2),
        experts=weights,
        shared=None,
        gate_weight=torch.zeros(2, 128),
        correction_bias=None,
    )
    return prepare_weights(layer, recipe, scales).experts


@pytest.mark.parametrize(("recipe", "scales", "count"), FORMS, ids=lambda value: str(value))
@pytest.mark.parametrize("name", ["w13", "w2"])
def test_shards_are_prepared_as_the_prepared_whole_is_sharded(recipe, scales, count, name):
    whole = checkpoint(recipe)
    for index in range(count):
        before = getattr(prepared(shard_experts(whole, index, count), recipe, scales), name)
        after = getattr(shard_experts(prepared(whole, recipe, scales), index, count), name)
        assert torch.equal(before.values.view(torch.uint8), after.values.view(torch.uint8))
        assert torch.equal(before.scale, after.scale)
        assert before.scale.stride() == after.scale.stride()
        assert before.group_size == after.group_size


@pytest.mark.parametrize(
    "recipe", [QuantRecipe.FP8_PER_TENSOR, QuantRecipe.MXFP8, QuantRecipe.MXFP4_W4A8]
)
def test_a_shard_of_a_checkpoint_stands_for_its_part_of_the_experts(recipe):
    whole = checkpoint(recipe)
    w13, w2 = stored_matrix(whole.w13), stored_matrix(whole.w2)
    for index, part in enumerate([slice(0, 128), slice(128, 256)]):
        shard = shard_experts(whole, index, 2)
        assert torch.equal(
            stored_matrix(shard.w13), torch.cat([w13[:256][part], w13[256:][part]], dim=0)
        )
        assert torch.equal(stored_matrix(shard.w2), w2[:, part])


def test_a_shard_has_the_bytes_and_scales_of_its_columns():
    """Two shards of 32 of 64 columns: bytes 16 to 31 of fp4 codes, and the second scale."""
    packed = torch.arange(32, dtype=torch.uint8).view(1, 1, 32)
    w2 = ExpertMatrix(values=packed, scale=torch.tensor([[[5, 9]]]).byte(), group_size=32)
    rows = torch.arange(128, dtype=torch.uint8).view(1, 128, 1)
    w13 = ExpertMatrix(values=rows.expand(1, 128, 16), scale=rows, group_size=32)
    shard = shard_experts(ExpertWeights(w13=w13, w2=w2), 1, 2)
    assert shard.w2.values.flatten().tolist() == list(range(16, 32))
    assert shard.w2.scale.flatten().tolist() == [9]
    assert shard.w13.scale.flatten().tolist() == [*range(32, 64), *range(96, 128)]


def test_a_shard_keeps_the_scales_of_whole_matrices():
    shard = shard_experts(checkpoint(QuantRecipe.FP8_PER_TENSOR), 1, 2)
    assert shard.w13.scale.tolist() == [[0.5, 0.25]] * 2
    assert shard.w2.scale.tolist() == [[0.5]] * 2


def test_one_scale_a_tensor_allows_shards_of_any_width():
    shard = shard_experts(checkpoint(QuantRecipe.FP8_PER_TENSOR), 3, 16)
    assert shard.w2.values.shape == (2, 128, 16)


@pytest.mark.parametrize("recipe", [QuantRecipe.MXFP8, QuantRecipe.MXFP4_W4A8])
def test_a_shard_that_cuts_a_group_of_32_is_refused(recipe):
    with pytest.raises(ValueError, match="256 in 16 shards gives 16 columns each, no multiple of"):
        shard_experts(checkpoint(recipe), 0, 16)
