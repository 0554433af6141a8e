"""Exact weights: one or two powers of two a row, drawn for each expert by itself."""

from dataclasses import replace

import pytest
import torch

from moe.formats import ActivationKind, GatedActivation, QuantRecipe, ScaleFormat
from scenarios.exact_weights import ExactWeights, Pattern, pattern_of

OAI = GatedActivation(kind=ActivationKind.OAI_SWIGLU, limit=7.0, alpha=1.702)
RULES = {
    "silu": GatedActivation(),
    "silu with limit": GatedActivation(limit=10.0),
    "oai_swiglu": OAI,
    "situ": GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0),
}

SOURCE = ExactWeights(
    seed=7,
    hidden_size=256,
    intermediate_size=384,
    shared_intermediate_size=256,
    num_experts=32,
    correction_bias=False,
    recipe=QuantRecipe.FP8_BLOCK128,
    activation=RULES["silu with limit"],
    scale_format=ScaleFormat.UE8M0,
)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("expert", [0, 1, 3])
def test_rows_have_one_or_two_terms_that_are_powers_of_two(rule, expert):
    for matrix in replace(SOURCE, activation=RULES[rule]).ideal_expert(expert):
        terms = (matrix != 0).sum(1)
        assert set(terms.tolist()) <= {1, 2}
        mantissa, _ = torch.frexp(matrix[matrix != 0].abs())
        assert set(mantissa.tolist()) == {0.5}


def test_the_second_terms_of_an_expert_cross_blocks_where_its_pattern_says_so():
    def crossing(expert):
        _, w2 = SOURCE.ideal_expert(expert)
        return int(((w2.view(256, 3, 128) != 0).any(2).sum(1) > 1).sum())

    assert pattern_of(1) is Pattern.CROSSING
    assert crossing(1) > 0
    assert crossing(0) == 0


def test_patterns_go_by_the_logical_expert():
    named = [pattern_of(expert) for expert in range(16)]
    assert [named.count(pattern) for pattern in Pattern] == [11, 1, 4]


def test_an_expert_does_not_depend_on_who_is_drawn_with_it():
    alone, among = SOURCE.experts([5]), SOURCE.experts([2, 5, 9])
    assert torch.equal(alone.w13.values.view(torch.uint8)[0], among.w13.values.view(torch.uint8)[1])


def test_experts_differ_pairwise():
    drawn = [SOURCE.ideal_expert(expert)[0] for expert in range(8)]
    assert all(not torch.equal(one, other) for one in drawn for other in drawn if one is not other)


def test_limits_on_an_edge_of_power_of_two_scales_have_gates_below():
    """7 * 2^j / 448 is a power of two: whether it is rounded up would hang on a last place."""
    on_edge, off_edge = (
        replace(SOURCE, activation=OAI, scale_format=scales).ideal_expert(0)[0]
        for scales in (ScaleFormat.UE8M0, ScaleFormat.FP32)
    )
    assert bool((on_edge[:384, 0] == 0.5).any())
    assert not bool((off_edge[:384, 0] == 0.5).any())


def test_where_up_is_at_its_clamp_gates_are_eight_and_down_has_two_bits_less():
    """Eight times ten is 5 * 2^4, ten times ten 25 * 2^2: a stored sum has eight bits for all."""
    w13, w2 = replace(SOURCE, scale_format=ScaleFormat.FP32).ideal_expert(3)
    gates = w13[:384]
    assert pattern_of(3) is Pattern.UP_CLAMP
    assert set(gates[:, 0].tolist()) == {-256.0, 1.0}
    assert set(w2[w2 != 0].abs().tolist()) == {1 / 16}
