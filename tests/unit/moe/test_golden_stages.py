"""The golden arithmetic of each stage against values worked out by hand."""

import math

import pytest
import torch

from moe.golden import (
    gated_silu,
    linear,
    ordered_sum,
    router_scores,
    select_experts,
    tail,
    weighted_sum,
)


def f64(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logits_of(*scores: float) -> torch.Tensor:
    """Logits whose sqrt(softplus) is the given scores: [1, E] float64."""
    return f64([math.log(math.expm1(score * score)) for score in scores])


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_linear_multiplies_rows_by_weight_rows():
    assert linear(f64([1.0, -2.0]), f64([3.0, 4.0], [5.0, 6.0])).value.tolist() == [[-5.0, -7.0]]


def test_the_magnitude_of_a_linear_is_the_sum_of_absolute_terms():
    got = linear(f64([1.0, -2.0]), f64([3.0, 4.0], [5.0, -6.0])).magnitude
    assert got.tolist() == [[11.0, 17.0]]


@pytest.mark.parametrize(
    ("logit", "score"),
    [
        (0.0, 0.8325546111576977),
        (-100.0, math.exp(-50.0)),
        (800.0, math.sqrt(800.0)),
        (-math.inf, 0.0),
        (math.inf, math.inf),
    ],
    ids=["zero", "far_below", "far_above", "-inf", "inf"],
)
def test_a_score_is_the_root_of_softplus(logit, score):
    assert router_scores(f64(logit)).item() == pytest.approx(score, rel=1e-14)


def test_the_score_of_nan_is_nan():
    assert router_scores(f64(math.nan)).isnan().all()


def test_experts_come_in_descending_order_of_rank_value():
    assert select_experts(logits_of(0.2, 0.9, 0.5, 0.7), None, 3, True).ids.tolist() == [[1, 3, 2]]


def test_ties_go_to_the_lowest_expert_id():
    logits = f64([1.0, 3.0, 1.0, 3.0, 1.0, 3.0])
    assert select_experts(logits, None, 4, True).ids.tolist() == [[1, 3, 5, 0]]


def test_ties_of_many_experts_go_to_the_lowest_ids():
    ids = select_experts(torch.zeros(3, 256, dtype=torch.float64), None, 6, True).ids
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3


def test_the_bias_decides_the_choice():
    bias = f64(0.0, 1.0, 0.0)
    assert select_experts(logits_of(0.9, 0.2, 0.5), bias, 2, True).ids.tolist() == [[1, 0]]


def test_the_bias_stays_out_of_the_weights():
    got = select_experts(logits_of(0.75, 0.25, 0.5), f64(0.0, 1.0, 0.0), 2, True)
    assert got.weights[0].tolist() == pytest.approx([0.25, 0.75], rel=1e-14)


def test_weights_are_renormalised_over_the_chosen():
    got = select_experts(logits_of(0.6, 0.1, 0.2), None, 2, True)
    assert got.weights[0].tolist() == pytest.approx([0.75, 0.25], rel=1e-14)


def test_weights_stay_scores_when_the_norm_is_off():
    got = select_experts(logits_of(0.6, 0.1, 0.2), None, 2, False)
    assert got.weights[0].tolist() == pytest.approx([0.6, 0.2], rel=1e-14)


def test_tiny_scores_are_renormalised_without_an_epsilon():
    got = select_experts(f64([-120.0, -120.0]), None, 2, True)
    assert got.weights.tolist() == [[0.5, 0.5]]


def test_weights_of_zero_scores_stay_zero():
    got = select_experts(f64([-math.inf, -math.inf]), None, 2, True)
    assert got.weights.tolist() == [[0.0, 0.0]]


def test_negative_logits_rank_like_any_other():
    assert select_experts(f64([-3.0, -1.0, -2.0]), None, 2, True).ids.tolist() == [[1, 2]]


def test_a_nan_logit_ranks_last():
    assert select_experts(f64([math.nan, -50.0, 0.0]), None, 2, True).ids.tolist() == [[2, 1]]


def test_rank_values_are_score_plus_bias_with_nan_at_the_bottom():
    got = select_experts(f64([math.nan, -math.inf]), f64(0.5, 0.25), 1, True)
    assert got.ranked.tolist() == [[-1e30, 0.25]]


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(
        ValueError, match=r"top_k \(3\) must not exceed the number of experts \(2\)"
    ):
        select_experts(f64([0.0, 1.0]), None, 3, True)


def test_gate_columns_come_first():
    assert gated_silu(f64([2.0, 3.0]), None).item() == pytest.approx(silu(2.0) * 3.0, rel=1e-15)


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (20.0, 1.0, silu(10.0)),
        (-20.0, 1.0, silu(-20.0)),
        (1.0, 20.0, silu(1.0) * 10.0),
        (1.0, -20.0, silu(1.0) * -10.0),
        (10.0, 10.0, silu(10.0) * 10.0),
        (math.inf, 1.0, silu(10.0)),
    ],
    ids=["gate_above", "gate_below", "up_above", "up_below", "at_the_limit", "gate_inf"],
)
def test_the_clamp_bounds_gate_from_above_and_up_on_both_sides(gate, up, expected):
    assert gated_silu(f64([gate, up]), 10.0).item() == pytest.approx(expected, rel=1e-15)


def test_without_a_limit_nothing_is_clamped():
    assert gated_silu(f64([20.0, -30.0]), None).item() == pytest.approx(silu(20.0) * -30.0)


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [(math.nan, 1.0, silu(10.0)), (1.0, math.nan, silu(1.0) * -10.0)],
    ids=["gate", "up"],
)
def test_the_clamp_swallows_nan(gate, up, expected):
    assert gated_silu(f64([gate, up]), 10.0).item() == pytest.approx(expected, rel=1e-15)


def test_without_a_limit_nan_stays_nan():
    assert gated_silu(f64([math.nan, 1.0]), None).isnan().all()


def test_a_weighted_sum_adds_the_slots_of_a_token():
    rows = f64([[1.0, 2.0], [3.0, -4.0]])
    assert weighted_sum(rows, f64([0.5, 0.25])).value.tolist() == [[1.25, 0.0]]


def test_the_magnitude_of_a_weighted_sum_ignores_cancellation():
    rows = f64([[1.0, 2.0], [3.0, -4.0]])
    assert weighted_sum(rows, f64([0.5, 0.25])).magnitude.tolist() == [[1.25, 2.0]]


def test_an_ordered_sum_adds_the_partials():
    assert ordered_sum(f64([[1.0, 2.0]], [[3.0, -5.0]])).value.tolist() == [[4.0, -3.0]]


def test_the_magnitude_of_an_ordered_sum_ignores_cancellation():
    assert ordered_sum(f64([[1.0, 2.0]], [[3.0, -5.0]])).magnitude.tolist() == [[4.0, 7.0]]


def test_the_tail_scales_the_routed_part_alone():
    assert tail(f64([2.0]), f64([10.0]), 1.5).value.tolist() == [[13.0]]


def test_the_magnitude_of_the_tail_ignores_cancellation():
    assert tail(f64([2.0]), f64([-3.0]), 1.5).magnitude.tolist() == [[6.0]]


def test_the_tail_of_a_layer_without_shared_expert_is_the_scaled_routed_part():
    assert tail(f64([-2.0]), None, 1.5).value.tolist() == [[-3.0]]
