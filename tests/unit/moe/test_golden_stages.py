"""The golden arithmetic of each stage against values worked out by hand."""

import math

import pytest
import torch

from moe.golden import (
    gated_silu,
    linear,
    tail,
    weighted_sum,
)


def f64(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def silu(x: float) -> float:
    return x / (1 + math.exp(-x))


def test_linear_multiplies_rows_by_weight_rows():
    assert linear(f64([1.0, -2.0]), f64([3.0, 4.0], [5.0, 6.0])).value.tolist() == [[-5.0, -7.0]]


def test_the_magnitude_of_a_linear_is_the_sum_of_absolute_terms():
    got = linear(f64([1.0, -2.0]), f64([3.0, 4.0], [5.0, -6.0])).magnitude
    assert got.tolist() == [[11.0, 17.0]]


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


def test_the_tail_scales_the_routed_part_alone():
    assert tail(f64([2.0]), f64([10.0]), 1.5).value.tolist() == [[13.0]]


def test_the_magnitude_of_the_tail_ignores_cancellation():
    assert tail(f64([2.0]), f64([-3.0]), 1.5).magnitude.tolist() == [[6.0]]


def test_the_tail_of_a_layer_without_shared_expert_is_the_scaled_routed_part():
    assert tail(f64([-2.0]), None, 1.5).value.tolist() == [[-3.0]]
