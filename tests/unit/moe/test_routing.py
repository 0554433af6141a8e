"""Scores and the choice of experts."""

import math

import numpy as np
import pytest
import torch

from moe.formats import ScoringFunc
from moe.routing import RoutingRule, select_experts, sqrtsoftplus, weights_at


def rule(top_k: int, *, renormalize: bool = True) -> RoutingRule:
    return RoutingRule(top_k=top_k, scoring_func=ScoringFunc.SQRTSOFTPLUS, renormalize=renormalize)


def logits_of(scores: list[list[float]]) -> torch.Tensor:
    """Logits whose scores are about these, by the inverse of sqrtsoftplus."""
    squares = torch.tensor(scores, dtype=torch.float64) ** 2
    return torch.log(torch.expm1(squares)).to(torch.float32)


def test_the_score_is_right_to_two_roundings_where_exp_is_a_normal_number():
    logits = torch.linspace(-87, 100, 100_001)
    exact = np.sqrt(np.logaddexp(0, logits.to(torch.float64).numpy()))
    error = np.abs(sqrtsoftplus(logits).to(torch.float64).numpy() / exact - 1)
    assert error.max() < 4 * 2.0**-24


def test_the_score_is_right_to_the_last_subnormal_of_its_square_below():
    logits = torch.linspace(-100, -87, 10_001)
    exact = np.logaddexp(0, logits.to(torch.float64).numpy())
    square = sqrtsoftplus(logits).to(torch.float64).numpy() ** 2
    assert (np.abs(square - exact) <= 2.0**-149 + 4 * 2.0**-24 * exact).all()


@pytest.mark.parametrize(
    ("logit", "expected"),
    [
        (0.0, math.sqrt(math.log(2))),
        (-math.inf, 0.0),
        (math.inf, math.inf),
        (3e38, math.sqrt(3e38)),
        (-3e38, 0.0),
    ],
    ids=["0", "-inf", "inf", "3e38", "-3e38"],
)
def test_the_score_of_an_extreme_logit(logit, expected):
    assert sqrtsoftplus(torch.tensor([logit])).item() == pytest.approx(expected, rel=1e-6)


def test_the_highest_scores_are_chosen_in_descending_order():
    topk = select_experts(torch.tensor([[0.0, 3.0, -1.0, 2.0, 1.0]]), None, rule(3))
    assert topk.topk_ids.tolist() == [[1, 3, 4]]


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        ([1.0] * 8, [0, 1, 2, 3]),
        ([0.0, 5.0, 0.0, 5.0, 0.0, 5.0, 0.0, 0.0], [1, 3, 5, 0]),
        ([-math.inf] * 8, [0, 1, 2, 3]),
    ],
    ids=["all", "two-levels", "minus-infinity"],
)
def test_a_tie_goes_to_the_lowest_expert(logits, expected):
    assert select_experts(torch.tensor([logits]), None, rule(4)).topk_ids.tolist() == [expected]


def test_many_equal_logits_keep_the_order_of_the_experts():
    ids = select_experts(torch.zeros(3, 512), None, rule(16)).topk_ids
    assert ids.tolist() == [list(range(16))] * 3


def test_the_bias_takes_part_in_the_choice():
    bias = torch.tensor([0.0, 0.0, 10.0, 0.0])
    topk = select_experts(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), bias, rule(2))
    assert topk.topk_ids.tolist() == [[2, 0]]


def test_the_weights_are_free_of_the_bias():
    logits = logits_of([[4.0, 3.0, 2.0, 1.0]])
    bias = torch.tensor([0.0, 0.0, 10.0, 0.0])
    topk = select_experts(logits, bias, rule(2, renormalize=False))
    assert topk.topk_weights.tolist() == [pytest.approx([2.0, 4.0], rel=1e-6)]


def test_renormalised_weights_are_shares_of_the_chosen():
    topk = select_experts(logits_of([[1.0, 3.0, 2.0, 0.5]]), None, rule(2))
    assert topk.topk_weights.tolist() == [pytest.approx([0.6, 0.4], rel=1e-6)]


def test_without_renormalising_the_weights_are_the_scores():
    topk = select_experts(logits_of([[1.0, 3.0, 2.0, 0.5]]), None, rule(2, renormalize=False))
    assert topk.topk_weights.tolist() == [pytest.approx([3.0, 2.0], rel=1e-6)]


def test_scores_that_are_all_zero_are_not_divided_by_their_sum():
    topk = select_experts(torch.full((1, 4), -torch.inf), None, rule(2))
    assert topk.topk_weights.tolist() == [[0.0, 0.0]]


@pytest.mark.parametrize("bias", [None, torch.tensor([100.0, 0.0, 0.0, 0.0])], ids=["", "biased"])
def test_a_nan_logit_ranks_last(bias):
    logits = torch.tensor([[torch.nan, -50.0, -60.0, -70.0]])
    assert select_experts(logits, bias, rule(4)).topk_ids.tolist() == [[1, 2, 3, 0]]


@pytest.mark.parametrize("num_tokens", [0, 1, 7])
def test_ids_are_int32_and_weights_fp32_for_any_number_of_tokens(num_tokens):
    topk = select_experts(torch.zeros(num_tokens, 8), None, rule(3))
    assert (topk.topk_ids.shape, topk.topk_ids.dtype) == ((num_tokens, 3), torch.int32)
    assert (topk.topk_weights.shape, topk.topk_weights.dtype) == ((num_tokens, 3), torch.float32)


def test_the_logits_are_handed_on():
    logits = torch.zeros(2, 4)
    assert select_experts(logits, None, rule(1)).logits is logits


def test_the_weights_of_given_routes_are_those_of_the_same_routes_chosen():
    logits = torch.randn(20, 16, generator=torch.Generator().manual_seed(1))
    topk = select_experts(logits, None, rule(4))
    assert torch.equal(weights_at(logits, topk.topk_ids, rule(4)), topk.topk_weights)


def test_a_given_route_that_is_dropped_weighs_nothing_and_leaves_the_sum():
    logits = logits_of([[1.0, 3.0, 2.0, 0.5]])
    weights = weights_at(logits, torch.tensor([[0, -1, 1]], dtype=torch.int32), rule(3))
    assert weights.tolist() == [pytest.approx([0.25, 0.0, 0.75], rel=1e-6)]


def test_given_routes_keep_their_scores_without_renormalising():
    logits = logits_of([[1.0, 3.0, 2.0, 0.5]])
    weights = weights_at(logits, torch.tensor([[3, 2]]), rule(2, renormalize=False))
    assert weights.tolist() == [pytest.approx([0.5, 2.0], rel=1e-6)]
