"""Every family of routers that ranks: groups, fused shared slots, padding rows."""

import math

import pytest
import torch

from moe.formats import ScoringFunc
from moe.golden.routing import GoldenRouting
from moe.golden.routing import select_experts as golden_select
from moe.routing import RoutingRule, select_experts

SCORES = [0.9, 0.1, 0.6, 0.5, 0.4, 0.3]
NO_BIAS = torch.zeros(6)


def rule(scoring_func=ScoringFunc.SIGMOID, *, top_k=2, **changes) -> RoutingRule:
    return RoutingRule(
        **{"top_k": top_k, "scoring_func": scoring_func, "renormalize": True, **changes}
    )


def sigmoid_logits(scores: list[float]) -> torch.Tensor:
    return torch.logit(torch.tensor([scores], dtype=torch.float64)).to(torch.float32)


def softmax_logits(scores: list[float]) -> torch.Tensor:
    return torch.log(torch.tensor([scores], dtype=torch.float64)).to(torch.float32)


def test_a_biased_group_counts_by_the_sum_of_its_best_two():
    topk = select_experts(sigmoid_logits(SCORES), NO_BIAS, rule(n_group=3))
    assert topk.topk_ids.tolist() == [[2, 3]]  # its best alone would choose experts 0 and 1


def test_experts_come_from_as_many_groups_as_the_rule_says():
    topk = select_experts(sigmoid_logits(SCORES), NO_BIAS, rule(n_group=3, topk_group=2))
    assert topk.topk_ids.tolist() == [[0, 2]]


def test_negative_ranks_of_a_chosen_group_stand_above_the_other_groups():
    topk = select_experts(sigmoid_logits(SCORES), NO_BIAS - 2, rule(n_group=3))
    assert topk.topk_ids.tolist() == [[2, 3]]


def test_the_bias_chooses_the_group():
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 3.0, 0.0])
    topk = select_experts(sigmoid_logits(SCORES), bias, rule(n_group=3))
    assert topk.topk_ids.tolist() == [[4, 5]]


def test_grouped_weights_are_free_of_the_bias():
    bias = torch.tensor([0.0, 0.0, 0.0, 0.0, 3.0, 0.0])
    topk = select_experts(sigmoid_logits(SCORES), bias, rule(n_group=3, renormalize=False))
    assert topk.topk_weights.tolist() == [pytest.approx([0.4, 0.3], rel=1e-6)]


def test_a_tie_of_groups_goes_to_the_lowest():
    no_score = torch.full((1, 6), -torch.inf)
    sums_of_one = torch.tensor([0.75, 0.25, 0.5, 0.5, 1.0, 0.0])
    topk = select_experts(no_score, sums_of_one, rule(n_group=3, topk_group=2))
    assert topk.topk_ids.tolist() == [[0, 2]]  # expert 4 ranks highest, its group last


def test_an_unbiased_group_counts_by_its_best():
    logits = softmax_logits([0.30, 0.05, 0.25, 0.20, 0.15, 0.05])
    topk = select_experts(logits, None, rule(ScoringFunc.SOFTMAX, n_group=3))
    assert topk.topk_ids.tolist() == [[0, 1]]


def test_unchosen_groups_of_an_unbiased_router_count_as_zero():
    logits = torch.tensor([[-1.0, -200.0, 0.0, -200.0]])
    grouped = rule(ScoringFunc.SOFTMAX, n_group=2, renormalize=False)
    topk = select_experts(logits, None, grouped)
    assert topk.topk_ids.tolist() == [[2, 0]]  # expert 3 scores zero as well, 0 is lower
    assert topk.topk_weights.tolist() == [pytest.approx([1 / (1 + math.exp(-1)), 0.0], rel=1e-6)]


def test_softmax_weights_are_shares_of_all_experts_without_renormalising():
    logits = softmax_logits([0.1, 0.2, 0.3, 0.4])
    topk = select_experts(logits, None, rule(ScoringFunc.SOFTMAX, renormalize=False))
    assert topk.topk_ids.tolist() == [[3, 2]]
    assert topk.topk_weights.tolist() == [pytest.approx([0.4, 0.3], rel=1e-6)]


def test_renormalised_softmax_weights_are_shares_of_the_chosen():
    topk = select_experts(softmax_logits([0.1, 0.2, 0.3, 0.4]), None, rule(ScoringFunc.SOFTMAX))
    assert topk.topk_weights.tolist() == [pytest.approx([4 / 7, 3 / 7], rel=1e-6)]


def test_softmax_survives_logits_whose_exponential_overflows():
    topk = select_experts(torch.tensor([[3e38, -3e38, 0.0]]), None, rule(ScoringFunc.SOFTMAX))
    assert topk.topk_weights.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("bias", [None, NO_BIAS], ids=["unbiased", "biased"])
def test_sigmoid_scores_that_all_vanish_weigh_nothing(bias):
    topk = select_experts(torch.full((1, 6), -200.0), bias, rule())
    assert topk.topk_weights.tolist() == [[0.0, 0.0]]


def test_sigmoid_weights_are_shares_of_a_sum_that_has_an_epsilon():
    topk = select_experts(torch.full((1, 6), -46.0), NO_BIAS, rule())
    score = math.exp(-46.0)
    expected = score / (2 * score + 1e-20)
    assert topk.topk_weights.tolist() == [pytest.approx([expected] * 2, rel=1e-5)]


@pytest.mark.parametrize(
    ("logit", "score"),
    [
        (20.5, math.sqrt(20.5)),
        (0.0, math.sqrt(math.log(2))),
        (-30.0, math.exp(-15.0)),
        (200, 200**0.5),
    ],
    ids=["above-20", "0", "far-below", "exp-overflows"],
)
def test_the_v41_score_is_linear_under_the_root_above_20(logit, score):
    v41 = rule(ScoringFunc.SQRTSOFTPLUS, top_k=1, deepseek_v41=True, renormalize=False)
    got = select_experts(torch.tensor([[float(logit)]]), None, v41).topk_weights.item()
    assert got == pytest.approx(score, rel=1e-6)


@pytest.mark.parametrize(("deepseek_v41", "expected"), [(True, [1, 0]), (False, [0, 2])])
def test_a_nan_ranks_first_in_v41_and_last_in_v4(deepseek_v41, expected):
    logits = torch.tensor([[2.0, torch.nan, 1.0]])
    variant = rule(ScoringFunc.SQRTSOFTPLUS, deepseek_v41=deepseek_v41)
    assert select_experts(logits, None, variant).topk_ids.tolist() == [expected]


def test_shared_slots_follow_the_routed_ones():
    fused = rule(num_fused_shared=2, routed_scaling_factor=2.5)
    topk = select_experts(sigmoid_logits(SCORES), NO_BIAS, fused)
    assert topk.topk_ids.tolist() == [[0, 2, 6, 7]]


@pytest.mark.parametrize("scoring_func", list(ScoringFunc))
def test_a_shared_slot_weighs_one_once_the_factor_is_applied(scoring_func):
    fused = rule(scoring_func, num_fused_shared=1, routed_scaling_factor=2.5)
    topk = select_experts(torch.tensor([[0.5, -1.0, 2.0, 0.0]]), None, fused)
    assert topk.topk_weights[0, -1].item() == pytest.approx(1 / 2.5, rel=1e-6)


def test_shared_slots_take_nothing_from_the_routed_weights():
    fused = rule(num_fused_shared=1, routed_scaling_factor=2.5)
    topk = select_experts(sigmoid_logits(SCORES), NO_BIAS, fused)
    assert topk.topk_weights[0, :2].tolist() == pytest.approx([0.6, 0.4], rel=1e-6)


def test_without_renormalising_a_shared_slot_weighs_the_sum_over_the_factor():
    fused = rule(num_fused_shared=1, routed_scaling_factor=2.5, renormalize=False)
    topk = select_experts(sigmoid_logits(SCORES), NO_BIAS, fused)
    assert topk.topk_weights[0, -1].item() == pytest.approx(1.5 / 2.5, rel=1e-6)


@pytest.mark.parametrize("fused", [0, 1])
@pytest.mark.parametrize("scoring_func", list(ScoringFunc))
def test_a_padding_row_has_no_route_and_no_weight(scoring_func, fused):
    padded = torch.tensor([False, True])
    topk = select_experts(
        torch.ones(2, 4), None, rule(scoring_func, num_fused_shared=fused), is_padding=padded
    )
    assert topk.topk_ids[1].tolist() == [-1] * (2 + fused)
    assert topk.topk_weights[1].tolist() == [0.0] * (2 + fused)


def test_masking_leaves_the_tokens_alone():
    logits = sigmoid_logits(SCORES).repeat(2, 1)
    padded = torch.tensor([True, False])
    topk = select_experts(logits, NO_BIAS, rule(), is_padding=padded)
    assert topk.topk_ids[1].tolist() == [0, 2]
    assert topk.topk_weights[1].tolist() == pytest.approx([0.6, 0.4], rel=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_group": 4}, "6 experts do not divide into 4 groups"),
        ({"n_group": 6, "topk_group": 2}, "scored by its best two experts and has 1"),
        ({"n_group": 3, "top_k": 3}, r"top_k \(3\) must not exceed the 2 experts of 1 group"),
        ({"top_k": 7}, r"top_k \(7\) must not exceed the 6 experts"),
    ],
    ids=["uneven", "single", "too-few-in-groups", "too-few"],
)
def test_a_rule_that_does_not_fit_the_experts_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        select_experts(torch.zeros(1, 6), NO_BIAS, rule(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_group": 2}, r"topk_group \(2\) must be 1 to n_group 1"),
        ({"hashed": True}, "a hashed layer scores by sqrtsoftplus, not sigmoid"),
        ({"deepseek_v41": True}, r"DeepSeek V4\.1 scores by sqrtsoftplus, not sigmoid"),
    ],
    ids=["topk_group", "hashed", "v41"],
)
def test_a_rule_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        rule(**changes)


FAMILIES = {
    "v4": {"scoring_func": ScoringFunc.SQRTSOFTPLUS, "renormalize": True},
    "v41": {"scoring_func": ScoringFunc.SQRTSOFTPLUS, "renormalize": True, "deepseek_v41": True},
    "v3": {"scoring_func": ScoringFunc.SIGMOID, "renormalize": True, "n_group": 8, "topk_group": 4},
    "glm4": {"scoring_func": ScoringFunc.SIGMOID, "renormalize": True},
    "mixtral": {"scoring_func": ScoringFunc.SOFTMAX, "renormalize": True},
    "qwen": {"scoring_func": ScoringFunc.SOFTMAX, "renormalize": False},
    "v2": {"scoring_func": ScoringFunc.SOFTMAX, "renormalize": False, "n_group": 8},
    "fused": {
        "scoring_func": ScoringFunc.SIGMOID,
        "renormalize": True,
        "num_fused_shared": 2,
        "routed_scaling_factor": 2.5,
    },
    "hash": {"scoring_func": ScoringFunc.SQRTSOFTPLUS, "renormalize": True, "hashed": True},
}
BIASED = {"v4", "v41", "v3", "glm4", "fused"}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_golden_chooses_the_same_experts_with_the_same_weights(family):
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(200, 64, generator=generator) * 4
    bias = torch.randn(64, generator=generator) * 0.1 if family in BIASED else None
    of_layer = {
        "input_ids": torch.arange(200) % 50,
        "tid2eid": torch.rand(50, 64, generator=generator).argsort(dim=1)[:, :6],
    }
    fields = {"top_k": 6, **FAMILIES[family]}
    got = select_experts(logits, bias, RoutingRule(**fields), **of_layer)
    wide = None if bias is None else bias.double()
    want = golden_select(logits.double(), wide, GoldenRouting(**fields), **of_layer)
    assert got.topk_ids.tolist() == want.ids.tolist()
    torch.testing.assert_close(got.topk_weights.double(), want.weights, rtol=1e-5, atol=0)
