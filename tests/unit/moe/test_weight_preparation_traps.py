"""Scales of whole matrices, packed: which have a byte of their own and which trap, by name."""

import pickle

import pytest
import torch

from moe.formats import QuantRecipe, ScaleFormat
from moe.golden import unpack_ue8m0
from moe.weight_preparation import ScaleTrapError, prepare_per_tensor, prepare_weights
from moe.weights import ExpertMatrix, ExpertWeights, LayerWeights

FP32, UE8M0 = ScaleFormat.FP32, ScaleFormat.UE8M0
PER_TENSOR = QuantRecipe.FP8_PER_TENSOR


def per_tensor(*scales: tuple[float, ...]) -> ExpertMatrix:
    codes = torch.zeros(len(scales), 2, 128).to(torch.float8_e4m3fn)
    return ExpertMatrix(values=codes, scale=torch.tensor(scales))


def test_a_scale_that_is_no_power_of_two_traps_where_it_is_packed():
    with pytest.raises(ScaleTrapError) as trap:
        prepare_per_tensor(per_tensor((0.25, 0.25), (0.25, 0.3), (0.5, 0.25), (0.7, 0.3)), UE8M0)
    assert str(trap.value) == (
        "the weight scale 0.300000012 of slot 1 is no power of two: packing traps (1 more like "
        "it); per-tensor scales are never quantised again"
    )


@pytest.mark.parametrize("scale", [0.0, -0.0, -0.25, torch.inf, -torch.inf, torch.nan, 2.0**-127])
def test_a_scale_that_no_byte_stands_for_traps_where_it_is_packed(scale):
    with pytest.raises(ScaleTrapError, match="is no power of two: packing traps; "):
        prepare_per_tensor(per_tensor((scale, scale)), UE8M0)


@pytest.mark.parametrize("scale", [2.0**-126, 2.0**127])
def test_the_outermost_powers_of_two_are_packed(scale):
    got = prepare_per_tensor(per_tensor((scale, scale)), UE8M0)
    assert unpack_ue8m0(got.scale, 1).unique().tolist() == [scale]


@pytest.mark.parametrize(
    ("scales", "scale_format"),
    [((0.25, 0.25), UE8M0), ((0.3, 0.5), UE8M0), ((0.3, 0.25), FP32)],
    ids=["power-of-two", "the-larger-is-one", "fp32"],
)
def test_a_scale_that_is_not_packed_with_a_mantissa_does_not_trap(scales, scale_format):
    got = prepare_per_tensor(per_tensor(scales), scale_format)
    stored = unpack_ue8m0(got.scale, 1).float() if scale_format is UE8M0 else got.scale
    assert stored.unique().tolist() == torch.tensor([max(scales)]).tolist()


MATRICES = ("w13", "w2", "shared.w13", "shared.w2")


def layer_with(name: str, scale: float) -> LayerWeights:
    """Logical experts 4 and 5, where the last scale of one matrix is another."""
    w13, w2, shared_w13, shared_w2 = (
        per_tensor(*[(0.5,)] * (experts - 1), (scale if name == matrix else 0.5,))
        for matrix, experts in zip(MATRICES, (2, 2, 1, 1), strict=True)
    )
    return LayerWeights(
        expert_ids=torch.tensor([4, 5]),
        experts=ExpertWeights(w13=w13, w2=w2),
        shared=ExpertWeights(w13=shared_w13, w2=shared_w2),
        gate_weight=torch.ones(8, 128, dtype=torch.bfloat16),
        correction_bias=None,
    )


@pytest.mark.parametrize(
    ("name", "owner"),
    [
        ("w13", "w13 of expert 5"),
        ("w2", "w2 of expert 5"),
        ("shared.w13", "w13 of the shared expert"),
        ("shared.w2", "w2 of the shared expert"),
    ],
)
def test_a_scale_that_traps_names_the_matrix_and_the_logical_expert(name, owner):
    with pytest.raises(ScaleTrapError, match=f"the weight scale 3 of {owner} is no power of two"):
        prepare_weights(layer_with(name, 3.0), PER_TENSOR, UE8M0)


def test_a_trap_arrives_whole_from_another_process():
    trap = ScaleTrapError(0.3, 1, 0, "w2 of expert 5")
    assert str(pickle.loads(pickle.dumps(trap))) == str(trap)
