"""Faults of the router: each chooses or weighs as it says, and is idle where it cannot differ."""

from dataclasses import dataclass, replace

import pytest
import torch

from moe.faults.routing import (
    expert_groups_ignored,
    group_scored_by_best,
    masked_by_local_count,
    maximum_starts_at_zero,
    padding_rows_routed,
    renormalization_flipped,
    rule_behind,
    ties_to_highest_id,
    weights_from_biased_scores,
)
from moe.formats import ScoringFunc, Stage
from moe.routing import RoutingRule, select_experts
from moe.stages import GlueInOutput
from tests.unit.faults.values import context, layer_weights
from topology.layout import ParallelLayout
from topology.sync import SyncOptions, SyncPlan, sync_plan

SIGMOID = RoutingRule(top_k=2, scoring_func=ScoringFunc.SIGMOID, renormalize=True)
RULES = {
    "sqrtsoftplus": replace(SIGMOID, scoring_func=ScoringFunc.SQRTSOFTPLUS),
    "sqrtsoftplus of V4.1": replace(
        SIGMOID, scoring_func=ScoringFunc.SQRTSOFTPLUS, deepseek_v41=True
    ),
    "sigmoid": SIGMOID,
    "softmax": replace(SIGMOID, scoring_func=ScoringFunc.SOFTMAX),
}


def logits_of(*scores):
    """Logits whose sigmoids are these."""
    return torch.logit(torch.tensor([scores], dtype=torch.float64)).to(torch.float32)


def routed(logits, rule=SIGMOID, bias=None, is_padding=None):
    return select_experts(logits, bias, rule, is_padding=is_padding)


def seen(bias):
    return context({Stage.WEIGHTS: layer_weights(bias=bias)}, n_group=2, topk_group=1)


@pytest.mark.parametrize("renormalize", [True, False], ids=["normalised", "as they are"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_weights_tell_the_scores_they_came_from(rule, renormalize):
    rule = replace(rule, renormalize=renormalize)
    logits = torch.randn(50, 8, generator=torch.Generator().manual_seed(3)) * 9
    assert rule_behind(routed(logits, rule)) == rule


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_padding_among_the_rows_does_not_hide_the_rule(rule):
    """A vectorised function rounds the last few of other numbers of rows otherwise."""
    logits = torch.randn(6, 16, generator=torch.Generator().manual_seed(3))
    for padding in range(6):
        topk = routed(logits, rule, is_padding=torch.arange(6) == padding)
        assert replace(rule_behind(topk), deepseek_v41=rule.deepseek_v41) == rule


def test_pinned_weights_came_from_no_rule():
    topk = routed(logits_of(0.9, 0.5, 0.1))
    assert rule_behind(replace(topk, topk_weights=torch.tensor([[0.75, 0.25]]))) is None


def test_rows_without_all_routes_do_not_tell_the_rule():
    topk = routed(torch.zeros(1, 4), is_padding=torch.tensor([True]))
    assert rule_behind(topk) is None


@pytest.mark.parametrize(
    ("renormalize", "weights"),
    [(True, [0.9 / 1.6, 0.7 / 1.6]), (False, [0.9, 0.7])],
    ids=["normalised", "as they are"],
)
def test_weights_hold_the_bias(renormalize, weights):
    bias = torch.tensor([0.1, 0.3, 0.0])
    topk = routed(logits_of(0.8, 0.4, 0.2), replace(SIGMOID, renormalize=renormalize), bias)
    biased = weights_from_biased_scores(topk, seen(bias))
    assert torch.equal(biased.topk_ids, topk.topk_ids)
    assert biased.topk_weights.tolist() == [pytest.approx(weights)]


def test_rows_that_are_masked_get_no_weight_from_the_bias():
    bias = torch.tensor([0.1, 0.3, 0.0])
    logits = logits_of(0.8, 0.4, 0.2).repeat(2, 1)
    topk = routed(logits, SIGMOID, bias, is_padding=torch.tensor([False, True]))
    assert weights_from_biased_scores(topk, seen(bias)).topk_weights[1].tolist() == [0, 0]


def test_without_a_bias_the_weights_stay():
    topk = routed(logits_of(0.8, 0.4, 0.2))
    assert weights_from_biased_scores(topk, seen(None)) is topk


GROUPED = replace(SIGMOID, n_group=2, topk_group=1)
ONE_GOOD_OR_TWO = logits_of(0.9, 0.1, 0.6, 0.5)
"""The second pair adds up to more, the first has the best expert."""
NO_BIAS = torch.zeros(4)


def test_a_group_wins_by_its_best_expert_alone():
    topk = routed(ONE_GOOD_OR_TWO, GROUPED, NO_BIAS)
    assert topk.topk_ids.tolist() == [[2, 3]]
    wrong = group_scored_by_best(topk, seen(NO_BIAS))
    assert wrong.topk_ids.tolist() == [[0, 1]]
    assert wrong.topk_weights.tolist() == [pytest.approx([0.9, 0.1])]


@pytest.mark.parametrize(
    ("rule", "bias"),
    [(SIGMOID, NO_BIAS), (GROUPED, None)],
    ids=["no groups", "no bias"],
)
def test_groups_that_are_not_scored_by_two_experts_stay(rule, bias):
    topk = routed(ONE_GOOD_OR_TWO, rule, bias)
    assert group_scored_by_best(topk, seen(bias)) is topk


def test_of_tied_experts_the_last_ones_are_chosen():
    topk = routed(logits_of(0.5, 0.5, 0.5, 0.2))
    assert topk.topk_ids.tolist() == [[0, 1]]
    assert ties_to_highest_id(topk, seen(None)).topk_ids.tolist() == [[2, 1]]


def test_without_ties_the_highest_score_is_chosen_all_the_same():
    topk = routed(logits_of(0.5, 0.6, 0.7, 0.2))
    assert ties_to_highest_id(topk, seen(None)).topk_ids.tolist() == topk.topk_ids.tolist()


def test_ties_are_left_alone_where_groups_decide():
    topk = routed(logits_of(0.9, 0.1, 0.6, 0.6), GROUPED, NO_BIAS)
    assert ties_to_highest_id(topk, seen(NO_BIAS)) is topk


def test_experts_ranked_below_zero_lose_to_expert_0():
    bias = torch.tensor([-1.0, 0.0, -0.5, -1.0])
    topk = routed(logits_of(0.2, 0.3, 0.4, 0.1), SIGMOID, bias)
    assert topk.topk_ids.tolist() == [[1, 2]]
    wrong = maximum_starts_at_zero(topk, seen(bias))
    assert wrong.topk_ids.tolist() == [[1, 0]]
    assert wrong.topk_weights.tolist() == [pytest.approx([0.6, 0.4])]


@pytest.mark.parametrize(
    ("renormalize", "weights"),
    [(True, [0.6, 0.2]), (False, [0.75, 0.25])],
    ids=["not where due", "where not due"],
)
def test_normalisation_is_flipped(renormalize, weights):
    topk = routed(logits_of(0.2, 0.6, 0.1), replace(SIGMOID, renormalize=renormalize))
    flipped = renormalization_flipped(topk, seen(None))
    assert flipped.topk_ids.tolist() == [[1, 0]]
    assert flipped.topk_weights.tolist() == [pytest.approx(weights)]


def test_pinned_weights_are_not_normalised():
    topk = routed(logits_of(0.9, 0.5, 0.1))
    pinned = replace(topk, topk_weights=torch.tensor([[0.75, 0.25]]))
    assert renormalization_flipped(pinned, seen(None)) is pinned


@pytest.mark.parametrize(
    "fault",
    [
        weights_from_biased_scores,
        group_scored_by_best,
        ties_to_highest_id,
        maximum_starts_at_zero,
        renormalization_flipped,
    ],
)
def test_a_table_chooses_and_normalises_whatever_the_scores(fault):
    bias = torch.tensor([-1.0, 0.0, -0.5, -1.0])
    topk = routed(logits_of(0.5, 0.5, 0.4, 0.1), SIGMOID, bias)
    hashed = replace(layer_weights(bias=bias), tid2eid=torch.zeros(1, 2, dtype=torch.int32))
    assert fault(topk, context({Stage.WEIGHTS: hashed}, n_group=2, topk_group=1)) is topk


def test_rows_behind_the_ranks_own_number_of_rows_are_masked():
    topk = routed(torch.randn(3, 4, generator=torch.Generator().manual_seed(0)))
    rows = GlueInOutput(own=torch.zeros(2, 1), hidden_states=torch.zeros(3, 1))
    masked = masked_by_local_count(topk, context({Stage.GLUE_IN: rows}))
    assert torch.equal(masked.topk_ids[:2], topk.topk_ids[:2])
    assert masked.topk_ids[2].tolist() == [-1, -1]
    assert masked.topk_weights[2].tolist() == [0, 0]


@dataclass(frozen=True)
class Plan:
    routing: RoutingRule = GROUPED
    sync: SyncPlan | None = None


def test_every_group_is_a_candidate():
    assert expert_groups_ignored(Plan(), {}, 0).routing == replace(GROUPED, topk_group=2)


def test_padding_is_routed_on_the_rank_that_holds_it():
    """Of 3 tokens and a padding row the second rank of the group has the second half."""
    layout = ParallelLayout(attn_dp=2, attn_tp=2, ep=4)
    sync = sync_plan(layout, (3, 4), a2a=True, extend=True, options=SyncOptions())
    plan = Plan(sync=sync)
    edited = [padding_rows_routed(plan, {}, rank) for rank in range(4)]
    assert [one.sync.masks_padding for one in edited] == [True, False, True, True]
    assert edited[0] is plan
