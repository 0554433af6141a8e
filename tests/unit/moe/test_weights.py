"""Load-time layouts: what stays as it is, and what is quantised a second time."""

import pytest
import torch
from torch import Tensor

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import decode_e4m3, requantize_weight, unpack_ue8m0
from moe.quant.fp8 import quantize_blocks
from moe.weights import (
    CommonWeights,
    ExpertMatrix,
    ExpertWeights,
    LayerWeights,
    checkpoint_weights,
    prepare_weights,
    requantize_ue8m0,
)

EXPERTS, HIDDEN, INTERMEDIATE = 2, 384, 256


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def matrix(seed: int, n: int, k: int, *, experts: int = EXPERTS, fp8: bool = True) -> ExpertMatrix:
    values = drawn(seed, experts, n, k)
    if not fp8:
        return ExpertMatrix(values=values, scale=None)
    blocks = quantize_blocks(values, ScaleFormat.FP32)
    return ExpertMatrix(values=blocks.values, scale=blocks.scale_inv)


def expert_weights(seed: int, *, experts: int = EXPERTS, fp8: bool = True) -> ExpertWeights:
    return ExpertWeights(
        w13=matrix(seed, 2 * INTERMEDIATE, HIDDEN, experts=experts, fp8=fp8),
        w2=matrix(seed + 1, HIDDEN, INTERMEDIATE, experts=experts, fp8=fp8),
    )


class HandWrittenSource:
    """A weight source that remembers which experts were asked for."""

    def __init__(self, *, fp8: bool = True, shared: bool = True) -> None:
        self.asked: list[int] = []
        self._fp8 = fp8
        self._shared = shared

    def experts(self, expert_ids):
        self.asked += expert_ids
        return expert_weights(1, fp8=self._fp8)

    def common(self) -> CommonWeights:
        return CommonWeights(
            shared=expert_weights(5, experts=1, fp8=self._fp8) if self._shared else None,
            gate_weight=drawn(7, 8, HIDDEN),
            correction_bias=torch.arange(8.0),
        )


def layer(**options: bool) -> LayerWeights:
    return checkpoint_weights(HandWrittenSource(**options), [4, 5])


def prepared(scale_format: ScaleFormat = ScaleFormat.UE8M0, **options: bool) -> LayerWeights:
    return prepare_weights(layer(**options), QuantRecipe.FP8_BLOCK128, scale_format)


def matrices(weights: LayerWeights) -> dict[str, ExpertMatrix]:
    assert weights.shared is not None
    return {
        "w13": weights.experts.w13,
        "w2": weights.experts.w2,
        "shared.w13": weights.shared.w13,
        "shared.w2": weights.shared.w2,
    }


NAMES = pytest.mark.parametrize("name", ["w13", "w2", "shared.w13", "shared.w2"])


def test_a_rank_asks_for_the_experts_it_holds():
    source = HandWrittenSource()
    weights = checkpoint_weights(source, [4, 5])
    assert source.asked == [4, 5]
    assert (weights.expert_ids.tolist(), weights.expert_ids.dtype) == ([4, 5], torch.int64)


@pytest.mark.parametrize(
    ("recipe", "scale_format"),
    [
        (QuantRecipe.BF16, ScaleFormat.NONE),
        (QuantRecipe.FP8_BLOCK128, ScaleFormat.FP32),
    ],
    ids=["bf16", "fp8-fp32-scales"],
)
def test_weights_that_the_gemm_reads_already_are_kept(recipe, scale_format):
    checkpoint = layer(fp8=recipe is not QuantRecipe.BF16)
    assert prepare_weights(checkpoint, recipe, scale_format) is checkpoint


@NAMES
def test_ue8m0_scales_are_packed_one_row_of_them_for_each_output_row(name):
    got = matrices(prepared())[name]
    experts, n, k = got.values.shape
    words = -(-k // 512)
    assert (got.scale.dtype, got.scale.shape) == (torch.int32, (experts, n, words))


@NAMES
def test_packed_scales_are_mn_major(name):
    scale = matrices(prepared())[name].scale
    _, n, words = scale.shape
    assert scale.stride() == (words * n, 1, n)


@NAMES
def test_requantised_codes_are_the_golden_models(name):
    before, after = matrices(layer())[name], matrices(prepared())[name]
    for expert in range(before.values.shape[0]):
        golden = requantize_weight(
            decode_e4m3(before.values[expert].view(torch.uint8)),
            before.scale[expert].to(torch.float64),
        )
        assert torch.equal(decode_e4m3(after.values[expert].view(torch.uint8)), golden.codes)


@NAMES
def test_requantised_scales_are_the_golden_models(name):
    before, after = matrices(layer())[name], matrices(prepared())[name]
    for expert in range(before.values.shape[0]):
        golden = requantize_weight(
            decode_e4m3(before.values[expert].view(torch.uint8)),
            before.scale[expert].to(torch.float64),
        )
        groups = golden.scale.shape[1]
        by_row = golden.scale.repeat_interleave(128, dim=0)[: before.values.shape[1]]
        assert torch.equal(unpack_ue8m0(after.scale[expert], groups), by_row)


def test_rows_that_end_inside_a_block_keep_its_scale():
    got = requantize_ue8m0(matrix(9, 200, 256))
    scales = unpack_ue8m0(got.scale, 2)
    assert got.scale.stride() == (200, 1, 200)
    assert torch.equal(scales[:, 128], scales[:, 199])


def test_requantising_loses_values_a_second_time():
    before = matrix(11, 128, 128, experts=1)
    after = requantize_ue8m0(before)
    assert not torch.equal(before.values.view(torch.uint8), after.values.view(torch.uint8))


def test_a_scale_that_is_a_power_of_two_survives_with_its_codes():
    # The block holds a 448, so its scale cannot change; products with 2^-3 are exact in bf16.
    codes = torch.randint(-7, 8, (1, 128, 128), generator=torch.Generator().manual_seed(1))
    values = codes.to(torch.float32)
    values[0, 0, 0] = 448
    before = ExpertMatrix(values=values.to(torch.float8_e4m3fn), scale=torch.full((1, 1, 1), 0.125))
    after = requantize_ue8m0(before)
    assert torch.equal(after.values.view(torch.uint8), before.values.view(torch.uint8))
    assert unpack_ue8m0(after.scale, 1).unique().tolist() == [0.125]


def test_gate_and_bias_pass_unchanged():
    given, got = layer(), prepared()
    assert torch.equal(got.gate_weight, given.gate_weight)
    assert torch.equal(got.correction_bias, given.correction_bias)


def test_a_layer_without_a_shared_expert_has_none_afterwards():
    assert prepared(shared=False).shared is None
