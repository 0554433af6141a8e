"""Faults of single rows of the router: what each leaves in its row, and where it is idle."""

from dataclasses import replace

import pytest
import torch

from moe.faults.router_slips import (
    expert_chosen_twice,
    hash_of_next_entry,
    nan_scores,
    padding_mask_rolled,
    renormalized_without_guard,
    scaling_factor_in_router,
)
from moe.faults.routing import masked_groups_score_zero
from moe.formats import ScoringFunc, Stage
from moe.routing import RoutingRule, select_experts
from moe.stages import GlueInOutput
from tests.unit.faults.values import context, layer_weights

RULE = RoutingRule(top_k=2, scoring_func=ScoringFunc.SIGMOID, renormalize=True)
LOGITS = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 3.0, 2.0]])
PADDED = torch.tensor([False, False, True])
TABLE = torch.tensor([[0, 1], [2, 3], [1, 3]])


def routed(rule=RULE, is_padding=None, logits=LOGITS, bias=None):
    return select_experts(logits, bias, rule, is_padding=is_padding)


def seen(tid2eid=None, bias=None, input_ids=None, **params):
    weights = replace(layer_weights(bias=bias, num_experts=4), tid2eid=tid2eid)
    rows = torch.zeros(3, 1)
    glue = GlueInOutput(own=rows, hidden_states=rows, input_ids=input_ids)
    return context({Stage.WEIGHTS: weights, Stage.GLUE_IN: glue}, **params)


def test_weights_hold_a_factor_and_ids_stay():
    topk = routed()
    wrong = scaling_factor_in_router(topk, seen(factor=2.0))
    assert torch.equal(wrong.topk_weights, topk.topk_weights * 2)
    assert wrong.topk_ids is topk.topk_ids


def test_a_row_without_routes_has_no_weights_that_are_numbers_and_others_stay():
    wrong = renormalized_without_guard(routed(is_padding=PADDED), seen()).topk_weights
    assert wrong.isnan().all(1).tolist() == [False, False, True]
    assert torch.equal(wrong[:2], routed().topk_weights[:2])


def test_weights_that_are_not_normalised_need_no_guard():
    topk = routed(replace(RULE, renormalize=False), PADDED)
    assert renormalized_without_guard(topk, seen()) is topk


@pytest.mark.parametrize(
    ("row", "ids"), [(1, [[0, 1], [-1, -1], [2, 3]]), (3, [[-1, -1], [3, 2], [2, 3]])]
)
def test_a_row_whose_scores_are_no_numbers_has_no_route(row, ids):
    wrong = nan_scores(routed(), seen(row=row))
    assert wrong.topk_ids.tolist() == ids
    assert wrong.logits.isnan().any(1).tolist() == [i[0] < 0 for i in ids]
    assert wrong.topk_weights.isnan().any(1).tolist() == [i[0] < 0 for i in ids]


def test_the_second_slot_repeats_the_first():
    assert expert_chosen_twice(routed(), seen(row=1)).topk_ids.tolist() == [[0, 1], [3, 3], [2, 3]]


def test_a_single_slot_has_none_to_repeat():
    topk = routed(replace(RULE, top_k=1))
    assert expert_chosen_twice(topk, seen(row=1)).topk_ids.tolist() == topk.topk_ids.tolist()


@pytest.mark.parametrize(("token", "ids"), [(0, [2, 3]), (2, [0, 1])], ids=["next", "wraps"])
def test_experts_come_from_the_entry_behind(token, ids):
    topk = routed(is_padding=torch.tensor([False, False, True]))
    there = seen(TABLE, input_ids=torch.tensor([token, 1, 1]), row=0)
    wrong = hash_of_next_entry(topk, there)
    assert wrong.topk_ids.tolist() == [ids, *topk.topk_ids[1:].tolist()]
    assert wrong.topk_weights[0].sum().item() == pytest.approx(1)


def test_a_layer_without_a_table_reads_none():
    topk = routed()
    assert hash_of_next_entry(topk, seen(row=0)) is topk


def test_the_mask_is_one_row_late():
    wrong = padding_mask_rolled(routed(is_padding=PADDED), seen())
    assert wrong.topk_ids.tolist() == [[-1, -1], [3, 2], [2, 3]]
    assert (wrong.topk_weights != 0).all(1).tolist() == [False, True, True]


def test_a_mask_of_nothing_cannot_be_late():
    topk = routed()
    assert padding_mask_rolled(topk, seen()) is topk


def test_negative_experts_of_chosen_groups_lose_to_zeros_of_the_others():
    logits, bias = LOGITS[:1], torch.tensor([-2.0, -2.0, -4.0, -4.0])
    topk = select_experts(logits, bias, replace(RULE, n_group=2))
    assert topk.topk_ids.tolist() == [[0, 1]]
    wrong = masked_groups_score_zero(topk, seen(bias=bias, n_group=2, topk_group=1))
    assert wrong.topk_ids.tolist() == [[2, 3]]


def test_positive_experts_of_chosen_groups_win_over_zeros():
    topk = routed(replace(RULE, n_group=2))
    wrong = masked_groups_score_zero(topk, seen(n_group=2, topk_group=1))
    assert wrong.topk_ids.tolist() == topk.topk_ids.tolist()
