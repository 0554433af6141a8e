"""The golden arithmetic of each stage against values worked out by hand."""

import torch

from moe.golden import (
    linear,
    tail,
    weighted_sum,
)


def f64(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_linear_multiplies_rows_by_weight_rows():
    assert linear(f64([1.0, -2.0]), f64([3.0, 4.0], [5.0, 6.0])).value.tolist() == [[-5.0, -7.0]]


def test_the_magnitude_of_a_linear_is_the_sum_of_absolute_terms():
    got = linear(f64([1.0, -2.0]), f64([3.0, 4.0], [5.0, -6.0])).magnitude
    assert got.tolist() == [[11.0, 17.0]]


def test_a_weighted_sum_adds_the_slots_of_a_token():
    rows = f64([[1.0, 2.0], [3.0, -4.0]])
    assert weighted_sum(rows, f64([0.5, 0.25])).value.tolist() == [[1.25, 0.0]]


def test_the_magnitude_of_a_weighted_sum_ignores_cancellation():
    rows = f64([[1.0, 2.0], [3.0, -4.0]])
    assert weighted_sum(rows, f64([0.5, 0.25])).magnitude.tolist() == [[1.25, 2.0]]


def test_the_tail_scales_the_routed_part_alone():
    assert tail(f64([2.0]), f64([10.0]), 1.5).value.tolist() == [[13.0]]


def test_the_magnitude_of_the_tail_ignores_cancellation():
    assert tail(f64([2.0]), f64([-3.0]), 1.5).magnitude.tolist() == [[6.0]]


def test_the_tail_of_a_layer_without_shared_expert_is_the_scaled_routed_part():
    assert tail(f64([-2.0]), None, 1.5).value.tolist() == [[-3.0]]
