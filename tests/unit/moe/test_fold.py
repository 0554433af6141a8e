"""Sums in a written order, with an fp32 accumulator."""

import pytest
import torch

from moe.fold import fold_topk_weights

BIG = 2.0**24


def rows(*slots: float) -> torch.Tensor:
    """[K, 1] bf16: grouped row k is the one of slot k."""
    return torch.tensor(slots, dtype=torch.bfloat16).view(-1, 1)


def fold(values: torch.Tensor, weights: list[float], is_route: list[bool]) -> list[list[float]]:
    routes = torch.tensor([is_route])
    index = torch.arange(len(weights))[None].masked_fill(~routes, -1)
    return fold_topk_weights(values, index, torch.tensor([weights]), routes).tolist()


def test_each_slot_is_weighted():
    assert fold(rows(1.0, 10.0, 100.0), [1.0, 2.0, 0.5], [True] * 3) == [[71.0]]


def test_slots_are_added_in_ascending_order():
    # 2^24 + 1 is 2^24 in fp32: the one is lost in this order and in no other.
    assert fold(rows(BIG, 1.0, -BIG), [1.0] * 3, [True] * 3) == [[0.0]]


def test_the_weighted_sum_is_rounded_to_bf16_once():
    # Each 2^-8 alone is a tie that rounds back to 1; together they are one step of bf16.
    assert fold(rows(1.0, 1.0, 1.0), [1.0, 2.0**-8, 2.0**-8], [True] * 3) == [[1.0078125]]


@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, 7.0])
def test_a_slot_that_is_no_route_does_not_count(rubbish):
    assert fold(rows(3.0, rubbish), [2.0, 5.0], [True, False]) == [[6.0]]


def test_the_weight_of_a_slot_that_is_no_route_does_not_count():
    assert fold(rows(3.0, 1.0), [2.0, torch.nan], [True, False]) == [[6.0]]


def test_a_token_without_a_route_is_zero():
    assert fold(rows(torch.nan, 1.0), [1.0, 1.0], [False, False]) == [[0.0]]


def test_the_factor_multiplies_the_sum_before_it_is_rounded():
    # 1 + 2^-8 alone is a tie that goes to 1; three times it is nearest to 3.015625 in bf16.
    index = torch.tensor([[0, 1]], dtype=torch.int32)
    weights, is_route = torch.tensor([[1.0, 2.0**-8]]), torch.ones(1, 2, dtype=torch.bool)
    folded = fold_topk_weights(rows(1.0, 1.0), index, weights, is_route, factor=3.0)
    assert folded.tolist() == [[3.015625]]
