"""The float64 router of every family against values worked out by hand."""

import math

import pytest
import torch

from moe.formats import ScoringFunc
from moe.golden.routing import GoldenRouting, route_weights, router_scores, select_experts

SQRTSOFTPLUS, SIGMOID, SOFTMAX = ScoringFunc
SCORES = [0.9, 0.1, 0.6, 0.5, 0.4, 0.3]


def f64(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def routing(scoring_func=SIGMOID, *, top_k=2, renormalize=True, **changes) -> GoldenRouting:
    return GoldenRouting(top_k=top_k, scoring_func=scoring_func, renormalize=renormalize, **changes)


V4 = routing(SQRTSOFTPLUS)
HASHED = {"hashed": True, "top_k": 2}
TABLE = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
LOGITS = torch.logit(f64(SCORES))
NO_BIAS = torch.zeros(6, dtype=torch.float64)


def logits_of(*scores: float) -> torch.Tensor:
    """Logits whose sqrt(softplus) is the given scores: [1, E] float64."""
    return f64([math.log(math.expm1(score * score)) for score in scores])


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
    assert router_scores(f64([logit]), V4).item() == pytest.approx(score, rel=1e-14)


def test_the_score_of_nan_is_nan():
    assert router_scores(f64([math.nan]), V4).isnan().all()


def test_experts_come_in_descending_order_of_rank_value():
    assert select_experts(
        logits_of(0.2, 0.9, 0.5, 0.7), None, routing(SQRTSOFTPLUS, top_k=3)
    ).ids.tolist() == [[1, 3, 2]]


def test_ties_go_to_the_lowest_expert_id():
    logits = f64([1.0, 3.0, 1.0, 3.0, 1.0, 3.0])
    assert select_experts(logits, None, routing(SQRTSOFTPLUS, top_k=4)).ids.tolist() == [
        [1, 3, 5, 0]
    ]


def test_ties_of_many_experts_go_to_the_lowest_ids():
    ids = select_experts(
        torch.zeros(3, 256, dtype=torch.float64), None, routing(SQRTSOFTPLUS, top_k=6)
    ).ids
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3


def test_the_bias_decides_the_choice():
    bias = f64(0.0, 1.0, 0.0)
    assert select_experts(
        logits_of(0.9, 0.2, 0.5), bias, routing(SQRTSOFTPLUS, top_k=2)
    ).ids.tolist() == [[1, 0]]


def test_weights_are_renormalised_over_the_chosen():
    got = select_experts(logits_of(0.6, 0.1, 0.2), None, routing(SQRTSOFTPLUS, top_k=2))
    assert got.weights[0].tolist() == pytest.approx([0.75, 0.25], rel=1e-14)


def test_weights_stay_scores_when_the_norm_is_off():
    got = select_experts(
        logits_of(0.6, 0.1, 0.2), None, routing(SQRTSOFTPLUS, top_k=2, renormalize=False)
    )
    assert got.weights[0].tolist() == pytest.approx([0.6, 0.2], rel=1e-14)


def test_tiny_scores_are_renormalised_without_an_epsilon():
    got = select_experts(f64([-120.0, -120.0]), None, routing(SQRTSOFTPLUS, top_k=2))
    assert got.weights.tolist() == [[0.5, 0.5]]


def test_negative_logits_rank_like_any_other():
    assert select_experts(
        f64([-3.0, -1.0, -2.0]), None, routing(SQRTSOFTPLUS, top_k=2)
    ).ids.tolist() == [[1, 2]]


def test_rank_values_are_score_plus_bias_with_nan_at_the_bottom():
    got = select_experts(f64([math.nan, -math.inf]), f64(0.5, 0.25), routing(SQRTSOFTPLUS, top_k=1))
    assert got.ranked.tolist() == [[-1e30, 0.25]]


def test_more_experts_a_token_than_there_are_is_refused():
    with pytest.raises(
        ValueError, match=r"top_k \(3\) must not exceed the number of experts \(2\)"
    ):
        select_experts(f64([0.0, 1.0]), None, routing(SQRTSOFTPLUS, top_k=3))


@pytest.mark.parametrize(
    ("scoring_func", "changes", "scores"),
    [
        (SQRTSOFTPLUS, {}, [math.sqrt(math.log(1 + math.exp(x))) for x in (0.0, 1.0, 21.0)]),
        (
            SQRTSOFTPLUS,
            {"deepseek_v41": True},
            [math.sqrt(math.log(2)), math.sqrt(math.log(1 + math.e)), math.sqrt(21.0)],
        ),
        (SIGMOID, {}, [0.5, 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-21))]),
        (
            SOFTMAX,
            {},
            [x / (1 + math.e + math.exp(21)) for x in (1.0, math.e, math.exp(21))],
        ),
    ],
    ids=["v4", "v41", "sigmoid", "softmax"],
)
def test_a_score_is_its_formula(scoring_func, changes, scores):
    got = router_scores(f64([0.0, 1.0, 21.0]), routing(scoring_func, **changes))
    assert got[0].tolist() == pytest.approx(scores, rel=1e-14)


def test_the_v41_score_differs_from_the_v4_score_above_20():
    got = [router_scores(f64([20.5]), routing(SQRTSOFTPLUS, deepseek_v41=v41)) for v41 in (0, 1)]
    assert got[0].item() > got[1].item() == math.sqrt(20.5)


@pytest.mark.parametrize("scoring_func", list(ScoringFunc))
def test_scores_of_huge_logits_are_numbers(scoring_func):
    assert router_scores(f64([3e38, -3e38, 800.0]), routing(scoring_func)).isfinite().all()


@pytest.mark.parametrize(("deepseek_v41", "expected"), [(True, [1, 0]), (False, [0, 2])])
def test_a_nan_ranks_first_in_v41_and_last_in_v4(deepseek_v41, expected):
    variant = routing(SQRTSOFTPLUS, deepseek_v41=deepseek_v41)
    assert select_experts(f64([2.0, math.nan, 1.0]), None, variant).ids.tolist() == [expected]


def test_a_biased_group_counts_by_the_sum_of_its_best_two():
    got = select_experts(LOGITS, NO_BIAS, routing(n_group=3))
    assert got.group_scores[0].tolist() == pytest.approx([1.0, 1.1, 0.7], rel=1e-14)
    assert got.ids.tolist() == [[2, 3]]


def test_an_unbiased_group_counts_by_its_best():
    got = select_experts(LOGITS, None, routing(n_group=3))
    assert got.group_scores[0].tolist() == pytest.approx([0.9, 0.6, 0.4], rel=1e-14)
    assert got.ids.tolist() == [[0, 1]]


@pytest.mark.parametrize(("bias", "outside"), [(NO_BIAS, -math.inf), (None, 0.0)])
def test_experts_outside_the_groups_rank_below_all_or_at_zero(bias, outside):
    got = select_experts(LOGITS, bias, routing(n_group=3, topk_group=2))
    assert got.ranked[0, 4:].tolist() == [outside] * 2
    assert got.ranked[0, :4].tolist() == pytest.approx(SCORES[:4], rel=1e-14)


def test_groups_may_be_given_instead_of_chosen():
    last = torch.tensor([[False, False, True]])
    got = select_experts(LOGITS, NO_BIAS, routing(n_group=3), groups_in_use=last)
    assert got.ids.tolist() == [[4, 5]]


def test_a_tie_of_groups_goes_to_the_lowest():
    no_score = torch.full((1, 6), -math.inf, dtype=torch.float64)
    sums_of_one = f64(0.75, 0.25, 0.5, 0.5, 1.0, 0.0)
    got = select_experts(no_score, sums_of_one, routing(n_group=3, topk_group=2))
    assert got.ids.tolist() == [[0, 2]]  # expert 4 ranks highest, its group last


def test_a_zero_outside_the_groups_may_win_a_tie_and_weighs_nothing():
    logits = f64([-1.0, -2000.0, 0.0, -2000.0])
    got = select_experts(logits, None, routing(SOFTMAX, n_group=2, renormalize=False))
    assert got.ids.tolist() == [[2, 0]]
    assert got.weights[0, 1].item() == 0.0


def test_there_are_no_group_scores_without_groups():
    assert select_experts(LOGITS, NO_BIAS, routing()).group_scores is None


@pytest.mark.parametrize(
    ("scoring_func", "logit", "weight"),
    [
        (SQRTSOFTPLUS, -120.0, 0.5),
        (SIGMOID, -46.0, math.exp(-46) / (1 + math.exp(-46))),
        (SOFTMAX, -46.0, 0.5),
    ],
)
def test_sigmoid_alone_is_renormalised_with_an_epsilon(scoring_func, logit, weight):
    got = select_experts(f64([logit, logit]), None, routing(scoring_func)).weights
    expected = weight if weight == 0.5 else weight / (2 * weight + 1e-20)
    assert got[0].tolist() == pytest.approx([expected] * 2, rel=1e-13)


@pytest.mark.parametrize("scoring_func", [SQRTSOFTPLUS, SIGMOID])
def test_scores_that_vanish_weigh_nothing(scoring_func):
    got = select_experts(f64([-math.inf, -math.inf]), None, routing(scoring_func))
    assert got.weights.tolist() == [[0.0, 0.0]]


def test_the_bias_stays_out_of_the_weights():
    bias = f64(0.0, 0.0, 0.0, 0.0, 3.0, 0.0)
    got = select_experts(LOGITS, bias, routing(n_group=3, renormalize=False))
    assert got.weights[0].tolist() == pytest.approx([0.4, 0.3], rel=1e-14)


def test_a_hashed_layer_keeps_the_order_of_its_table():
    got = select_experts(
        f64([9.0, 1.0, 5.0, 3.0], [9.0, 1.0, 5.0, 3.0]),
        None,
        routing(SQRTSOFTPLUS, **HASHED),
        input_ids=torch.tensor([1, 0]),
        tid2eid=TABLE,
    )
    assert got.ids.tolist() == [[0, 2], [3, 1]]


@pytest.mark.parametrize("renormalize", [True, False])
def test_hashed_weights_are_always_shares_with_an_epsilon(renormalize):
    rule = routing(SQRTSOFTPLUS, renormalize=renormalize, **HASHED)
    got = route_weights(f64([1e-20, 3e-20]), torch.tensor([[1, 0]]), rule)
    assert got[0].tolist() == pytest.approx([0.6, 0.2], rel=1e-14)


def test_a_hashed_layer_without_a_table_is_refused():
    with pytest.raises(ValueError, match="come from input_ids and tid2eid"):
        select_experts(LOGITS, None, routing(SQRTSOFTPLUS, **HASHED))


@pytest.mark.parametrize(
    ("changes", "weights"),
    [
        ({}, [0.6, 0.4, 0.4]),
        ({"renormalize": False}, [0.9, 0.6, 0.6]),
        ({"scoring_func": SQRTSOFTPLUS, "hashed": True}, [0.6, 0.4, 0.4]),
    ],
    ids=["renormalised", "plain", "hashed"],
)
def test_a_shared_slot_weighs_the_routed_sum_over_the_factor(changes, weights):
    rule = routing(num_fused_shared=1, routed_scaling_factor=2.5, **changes)
    got = route_weights(f64(SCORES), torch.tensor([[0, 2, 6]]), rule)
    assert got[0].tolist() == pytest.approx(weights, rel=1e-14)


def test_shared_slots_follow_the_routed_ones():
    got = select_experts(LOGITS, NO_BIAS, routing(num_fused_shared=2))
    assert got.ids.tolist() == [[0, 2, 6, 7]]


def test_a_dropped_route_weighs_nothing_and_leaves_the_sum():
    rule = routing(top_k=3, num_fused_shared=1)
    got = route_weights(f64(SCORES), torch.tensor([[0, -1, 2, -1]]), rule)
    assert got[0].tolist() == pytest.approx([0.6, 0.0, 0.4, 0.0], rel=1e-14)


def test_more_experts_than_the_groups_hold_are_refused():
    with pytest.raises(ValueError, match=r"top_k \(3\) must not exceed .* \(2\)"):
        select_experts(LOGITS, NO_BIAS, routing(top_k=3, n_group=3))


@pytest.mark.parametrize("scoring_func", list(ScoringFunc))
def test_no_tokens_have_no_routes(scoring_func):
    got = select_experts(torch.zeros(0, 6, dtype=torch.float64), None, routing(scoring_func))
    assert got.ids.shape == got.weights.shape == (0, 2)
