"""Twins of the golden: as right as it is, and different from it by roundings alone."""

from dataclasses import replace

import pytest
import torch

from moe.formats import GatedActivation, QuantRecipe, ScaleFormat, ScoringFunc
from moe.golden import GoldenModel, GoldenRouting, RoundingPath, SharedInSum, golden_forward

T, H, WIDTH, E, K = 24, 256, 128, 6, 3
RECIPES = {
    "bf16": (QuantRecipe.BF16, ScaleFormat.NONE),
    "ue8m0": (QuantRecipe.FP8_BLOCK128, ScaleFormat.UE8M0),
    "fp32 scales": (QuantRecipe.FP8_BLOCK128, ScaleFormat.FP32),
}
STEPS = 2.0**-7
"""From one bf16 value to the next, at most, relative to the value."""


class Weights:
    """Drawn weights of a layer with a shared expert."""

    intermediate_size = WIDTH
    correction_bias = tid2eid = None

    def __init__(self):
        generator = torch.Generator().manual_seed(3)

        def drawn(*shape):
            values = torch.randn(*shape, generator=generator) / 16
            return values.to(torch.bfloat16).to(torch.float64)

        self.gate_weight = drawn(E, H)
        self.w13, self.w2 = drawn(E, 2 * WIDTH, H), drawn(E, H, WIDTH)
        self.shared_w = (drawn(2 * WIDTH, H), drawn(H, WIDTH))

    def expert(self, expert):
        return self.w13[expert], self.w2[expert]

    def shared(self):
        return self.shared_w


def forward(twin, recipe="bf16", *, rounding=True, **path):
    quantised, scales = RECIPES[recipe]
    model = GoldenModel(
        routing=GoldenRouting(top_k=K, scoring_func=ScoringFunc.SIGMOID, renormalize=True),
        routed_scaling_factor=2.5,
        activation=GatedActivation(),
        recipe=quantised,
        scale_format=scales,
        path=RoundingPath(ep_size=2, **path),
        twin=twin,
    )
    tokens = torch.randn(T, H, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    return golden_forward(model, Weights(), tokens, rounding=rounding)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_twin_differs_from_the_golden_in_a_few_last_places_of_gemm1(recipe):
    golden, twin = forward(None, recipe), forward(1, recipe)
    same_input = (twin.dispatched == golden.dispatched.to(torch.float32)).all(1)
    got, want = twin.gate_up.double()[same_input], golden.gate_up[same_input]
    differs = got != want
    assert differs.double().mean() < 0.01
    assert ((got - want).abs() <= STEPS * want.abs() + 1e-4).all()


def test_twins_differ_from_the_golden_somewhere():
    golden = forward(None)
    assert any((forward(seed).output.double() != golden.output).any() for seed in range(3))


def test_a_seed_makes_the_same_twin_again():
    assert torch.equal(forward(5).output, forward(5).output)


def test_another_seed_makes_another_twin():
    assert any(not torch.equal(forward(5).output, forward(seed).output) for seed in range(6, 9))


def test_a_twin_has_the_routes_of_the_golden():
    assert torch.equal(forward(1).topk_ids, forward(None).topk_ids)


def test_a_twin_sums_in_fp32():
    assert forward(1).expert_output.dtype == torch.float32


@pytest.mark.parametrize("name", ["gate_up", "expert_output", "routed", "output"])
def test_a_twin_stores_bf16_where_the_golden_does(name):
    values = getattr(forward(1), name)
    assert torch.equal(values, values.to(torch.bfloat16).to(torch.float32))


def test_without_rounding_there_is_no_twin():
    assert torch.equal(forward(1, rounding=False).output, forward(None, rounding=False).output)


def test_the_first_ranks_part_of_the_shared_expert_stays_with_that_rank():
    path = {"folds_factor": True, "shared": SharedInSum.FIRST_RANK}
    golden, twin = forward(None, **path), forward(1, **path)
    assert (twin.output.double() != golden.output).double().mean() < 0.02


def test_the_twin_of_a_model_leaves_the_model_alone():
    model = GoldenModel(
        routing=GoldenRouting(top_k=1, scoring_func=ScoringFunc.SIGMOID, renormalize=False),
        routed_scaling_factor=1.0,
        activation=GatedActivation(),
        recipe=QuantRecipe.BF16,
        scale_format=ScaleFormat.NONE,
    )
    assert replace(model, twin=3) != model
    assert model.twin is None
