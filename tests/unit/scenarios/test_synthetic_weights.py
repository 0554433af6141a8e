"""Weights that depend on the scenario alone, in the form of each recipe's checkpoints."""

import pytest
import torch

from moe.formats import QuantRecipe, ScaleFormat
from moe.quant.fp8 import quantize_blocks
from scenarios.inputs import random_hidden_states
from scenarios.synthetic_weights import SyntheticWeights


def source(**changes) -> SyntheticWeights:
    sizes = {
        "seed": 7,
        "hidden_size": 256,
        "intermediate_size": 128,
        "shared_intermediate_size": 128,
        "num_experts": 8,
        "correction_bias": True,
        "recipe": QuantRecipe.BF16,
    }
    return SyntheticWeights(**{**sizes, **changes})


@pytest.mark.parametrize("recipe", QuantRecipe)
def test_an_expert_has_the_same_weights_whoever_asks(recipe):
    alone = source(recipe=recipe).experts([5])
    among_others = source(recipe=recipe).experts([2, 5, 7])
    assert torch.equal(bits(alone.w13.values[0]), bits(among_others.w13.values[1]))
    assert torch.equal(bits(alone.w2.values[0]), bits(among_others.w2.values[1]))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def test_an_expert_has_the_same_weights_in_a_larger_model():
    small, large = source(num_experts=8).experts([5]), source(num_experts=64).experts([5])
    assert torch.equal(small.w13.values, large.w13.values)


def test_experts_differ():
    weights = source().experts([0, 1])
    assert not torch.equal(weights.w13.values[0], weights.w13.values[1])


def test_the_shared_expert_is_none_of_the_routed_ones():
    assert not torch.equal(
        source().common().shared.w13.values[0], source().experts([0]).w13.values[0]
    )


def test_shapes_are_those_of_the_model():
    weights, common = source().experts([0, 3]), source().common()
    assert weights.w13.values.shape == (2, 256, 256)
    assert weights.w2.values.shape == (2, 256, 128)
    assert common.gate_weight.shape == (8, 256)
    assert common.correction_bias.shape == (8,)
    assert common.shared.w2.values.shape == (1, 256, 128)


def test_bf16_weights_have_no_scale():
    assert source().experts([0]).w13.scale is None


def test_fp8_weights_are_block_quantised_from_the_bf16_draw():
    drawn = source().experts([4]).w2.values[0]
    expected = quantize_blocks(drawn, ScaleFormat.FP32)
    got = source(recipe=QuantRecipe.FP8_BLOCK128).experts([4]).w2
    assert torch.equal(bits(got.values[0]), bits(expected.values))
    assert torch.equal(got.scale[0], expected.scale_inv)


def test_the_ideal_expert_is_the_draw_before_any_quantisation():
    w13, w2 = source(recipe=QuantRecipe.FP8_BLOCK128).ideal_expert(4)
    drawn = source().experts([4])
    assert torch.equal(w13, drawn.w13.values[0].to(torch.float64))
    assert torch.equal(w2, drawn.w2.values[0].to(torch.float64))


def test_the_ideal_shared_expert_is_the_draw_before_any_quantisation():
    w13, w2 = source(recipe=QuantRecipe.FP8_BLOCK128).ideal_shared()
    drawn = source().common().shared
    assert torch.equal(w13, drawn.w13.values[0].to(torch.float64))
    assert torch.equal(w2, drawn.w2.values[0].to(torch.float64))


def test_a_model_without_a_shared_expert_has_none():
    without = source(shared_intermediate_size=0)
    assert without.common().shared is None
    assert without.ideal_shared() is None


def test_a_model_without_a_correction_bias_has_none():
    assert source(correction_bias=False).common().correction_bias is None


def test_gate_values_spread_so_that_a_clamp_at_10_acts():
    rows = random_hidden_states(7, 256, 256).to(torch.float64)
    gate_up = rows @ source().ideal_expert(0)[0].t()
    assert 0.005 < (gate_up.abs() > 10).double().mean().item() < 0.02


E4M3, U8 = torch.float8_e4m3fn, torch.uint8
FORMS = {
    QuantRecipe.BF16: (torch.bfloat16, (2, 256, 256), None),
    QuantRecipe.FP8_BLOCK128: (E4M3, (2, 256, 256), (2, 2, 2)),
    QuantRecipe.FP8_PER_TENSOR: (E4M3, (2, 256, 256), (2, 2)),
    QuantRecipe.MXFP8: (E4M3, (2, 256, 256), (2, 256, 8)),
    QuantRecipe.MXFP4_W4A8: (U8, (2, 256, 128), (2, 256, 8)),
    QuantRecipe.MXFP4_AS_FP8: (U8, (2, 256, 128), (2, 256, 8)),
}


@pytest.mark.parametrize("recipe", FORMS)
def test_experts_have_the_form_of_the_recipes_checkpoints(recipe):
    w13 = source(recipe=recipe).experts([0, 3]).w13
    scale_shape = None if w13.scale is None else tuple(w13.scale.shape)
    assert (w13.values.dtype, tuple(w13.values.shape), scale_shape) == FORMS[recipe]


@pytest.mark.parametrize(
    ("recipe", "own"),
    [
        (QuantRecipe.FP8_PER_TENSOR, QuantRecipe.FP8_PER_TENSOR),
        (QuantRecipe.MXFP8, QuantRecipe.MXFP8),
        (QuantRecipe.MXFP4_W4A8, QuantRecipe.FP8_BLOCK128),
        (QuantRecipe.MXFP4_AS_FP8, QuantRecipe.FP8_BLOCK128),
    ],
)
def test_the_shared_expert_has_the_form_of_its_own_recipe(recipe, own):
    shared = source(recipe=recipe).common().shared
    expected = source(recipe=own).common().shared
    assert torch.equal(bits(shared.w13.values), bits(expected.w13.values))
    assert torch.equal(shared.w13.scale, expected.w13.scale)


def test_gate_and_up_have_scales_of_their_own():
    weights = source(recipe=QuantRecipe.FP8_PER_TENSOR)
    drawn = source().experts([4]).w13.values[0].float()
    largest = torch.stack([drawn[:128].abs().max(), drawn[128:].abs().max()])
    assert torch.equal(weights.experts([4]).w13.scale[0], largest / 448)


def test_scales_of_a_matrix_are_powers_of_two_where_asked_for():
    weights = source(recipe=QuantRecipe.FP8_PER_TENSOR, power_of_two_scales=True)
    experts, shared = weights.experts([0, 1]), weights.common().shared
    for matrix in (experts.w13, experts.w2, shared.w13, shared.w2):
        assert torch.equal(matrix.scale.frexp().mantissa, torch.full_like(matrix.scale, 0.5))


@pytest.mark.parametrize("recipe", QuantRecipe)
def test_ideal_experts_are_the_same_draw_under_every_recipe(recipe):
    w13, _ = source(recipe=recipe).ideal_expert(4)
    assert torch.equal(w13, source().experts([4]).w13.values[0].double())


@pytest.mark.parametrize("hidden_size", [256, 8192], ids=["kept", "hashed"])
def test_weights_are_made_on_the_default_device(hidden_size):
    recipe = QuantRecipe.FP8_BLOCK128
    with torch.device("meta"):
        weights = source(hidden_size=hidden_size, recipe=recipe).experts([3])
    for matrix in (weights.w13, weights.w2):
        assert {matrix.values.device.type, matrix.scale.device.type} == {"meta"}
    assert source(hidden_size=hidden_size).experts([3]).w13.values.device.type == "cpu"
