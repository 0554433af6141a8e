"""Sums in a written order, with an fp32 accumulator."""

import pytest
import torch

from moe.combine import fold_topk_weights, ordered_sum

BIG = 2.0**24


def rows(*slots: float) -> torch.Tensor:
    """[1, K, 1] bf16"""
    return torch.tensor(slots, dtype=torch.bfloat16).view(1, -1, 1)


def fold(values: torch.Tensor, weights: list[float], is_route: list[bool]) -> list[list[float]]:
    return fold_topk_weights(values, torch.tensor([weights]), torch.tensor([is_route])).tolist()


@pytest.mark.parametrize(
    ("terms", "expected"),
    [((BIG, 1.0, -BIG), 0.0), ((BIG, -BIG, 1.0), 1.0), ((1.0, BIG, -BIG), 0.0)],
    ids=["one-second", "one-last", "one-first"],
)
def test_terms_are_added_in_the_order_given(terms, expected):
    tensors = [torch.tensor([term], dtype=torch.bfloat16) for term in terms]
    assert ordered_sum(tensors, like=tensors[0]).tolist() == [expected]


def test_the_sum_of_bf16_terms_is_fp32():
    tensors = [torch.tensor([value], dtype=torch.bfloat16) for value in (1.0, 2.0**-20)]
    total = ordered_sum(tensors, like=tensors[0])
    assert (total.dtype, total.tolist()) == (torch.float32, [1 + 2.0**-20])


def test_no_terms_sum_to_zero():
    assert ordered_sum([], like=torch.ones(2, 3)).tolist() == [[0.0] * 3] * 2


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
