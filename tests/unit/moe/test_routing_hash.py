"""Hashed layers: a table chooses, the scores weigh."""

import math

import pytest
import torch

from moe.formats import ScoringFunc
from moe.routing import RoutingRule, select_experts

TABLE = torch.tensor([[3, 1], [0, 2], [2, 3]], dtype=torch.int32)


def hash_rule(*, top_k: int = 2, renormalize: bool = True, **changes) -> RoutingRule:
    return RoutingRule(
        top_k=top_k,
        scoring_func=ScoringFunc.SQRTSOFTPLUS,
        renormalize=renormalize,
        hashed=True,
        **changes,
    )


def hash_routes(logits: torch.Tensor, input_ids: list[int], hashed: RoutingRule, **more):
    return select_experts(
        logits, None, hashed, input_ids=torch.tensor(input_ids), tid2eid=TABLE, **more
    )


def test_a_hashed_layer_keeps_the_order_of_its_table():
    topk = hash_routes(torch.tensor([[9.0, 1.0, 5.0, 3.0]] * 3), [0, 2, 1], hash_rule())
    assert topk.topk_ids.tolist() == [[3, 1], [2, 3], [0, 2]]
    assert topk.topk_ids.dtype == torch.int32


@pytest.mark.parametrize("renormalize", [True, False])
def test_hashed_weights_are_shares_of_the_listed_whatever_the_rule_says(renormalize):
    logits = torch.log(torch.expm1(torch.tensor([[1.0, 9.0, 4.0, 16.0]]))).nan_to_num(16.0)
    topk = hash_routes(logits, [0], hash_rule(renormalize=renormalize))
    assert topk.topk_weights.tolist() == [pytest.approx([4 / 7, 3 / 7], rel=1e-6)]


def test_hashed_weights_have_an_epsilon_under_them():
    topk = hash_routes(torch.full((1, 4), -80.0), [1], hash_rule())
    score = math.exp(-40.0)
    assert topk.topk_weights.tolist() == [
        pytest.approx([score / (2 * score + 1e-20)] * 2, rel=1e-5)
    ]


@pytest.mark.parametrize("input_id", [-1, 3], ids=["below", "beyond"])
def test_an_id_outside_the_table_is_refused(input_id):
    with pytest.raises(ValueError, match=rf"row 1 has input id {input_id}; tid2eid has 3 ids"):
        hash_routes(torch.zeros(2, 4), [0, input_id], hash_rule())


def test_a_hashed_layer_without_ids_is_refused():
    with pytest.raises(ValueError, match="needs input_ids and tid2eid"):
        select_experts(torch.zeros(1, 4), None, hash_rule(), tid2eid=TABLE)


def test_a_table_of_another_width_is_refused():
    with pytest.raises(ValueError, match="tid2eid lists 2 experts an id, top_k is 3"):
        hash_routes(torch.zeros(1, 4), [0], hash_rule(top_k=3))


def test_a_hashed_layers_shared_slot_weighs_exactly_one_over_the_factor():
    fused = hash_rule(num_fused_shared=1, routed_scaling_factor=1.5)
    topk = hash_routes(torch.full((1, 4), -300.0), [0], fused)
    assert topk.topk_ids.tolist() == [[3, 1, 4]]
    assert topk.topk_weights[0, -1] == torch.tensor(1 / 1.5)


def test_a_padding_row_of_a_hashed_layer_keeps_its_weight():
    topk = hash_routes(
        torch.zeros(2, 4), [0, 0], hash_rule(), is_padding=torch.tensor([False, True])
    )
    assert topk.topk_ids.tolist() == [[3, 1], [-1, -1]]
    assert topk.topk_weights[1].tolist() == pytest.approx([0.5, 0.5], rel=1e-6)
