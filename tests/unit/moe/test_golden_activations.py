"""The golden activations against the formulas, and their stores against hand-written values."""

import math

import pytest
import torch

from moe.activation import ActivationStores, activate
from moe.formats import ActivationKind, GatedActivation
from moe.golden import Stores, gated, gated_as_stored

SILU = GatedActivation()
SILU_10 = GatedActivation(limit=10.0)
OAI = GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.702)
OAI_10 = GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.702, limit=10.0)
SITU = GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)


def f64(*values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def logistic(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def silu(x: float) -> float:
    return x * logistic(x)


def test_gate_columns_come_first():
    assert gated(f64([2.0, 3.0]), SILU).item() == pytest.approx(silu(2.0) * 3.0, rel=1e-15)


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
    assert gated(f64([gate, up]), SILU_10).item() == pytest.approx(expected, rel=1e-15)


def test_without_a_limit_nothing_is_clamped():
    assert gated(f64([20.0, -30.0]), SILU).item() == pytest.approx(silu(20.0) * -30.0)


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [(math.nan, 1.0, silu(10.0)), (1.0, math.nan, silu(1.0) * -10.0)],
    ids=["gate", "up"],
)
def test_the_clamp_swallows_nan(gate, up, expected):
    assert gated(f64([gate, up]), SILU_10).item() == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("rule", [SILU, OAI, SITU], ids=lambda rule: rule.kind)
def test_without_a_limit_nan_stays_nan(rule):
    assert gated(f64([math.nan, 1.0]), rule).isnan().all()


@pytest.mark.parametrize(
    ("gate", "up", "rule", "expected"),
    [
        (2.0, 3.0, OAI, 2.0 * logistic(1.702 * 2.0) * 4.0),
        (20.0, 20.0, OAI_10, 10.0 * logistic(17.02) * 11.0),
        (-20.0, -20.0, OAI_10, -20.0 * logistic(-34.04) * -9.0),
        (math.nan, math.nan, OAI_10, 10.0 * logistic(17.02) * -9.0),
        (4.0, 25.0, SITU, 100.0 * math.tanh(1.0) ** 2 * logistic(4.0)),
        (-2.0, -1.0, SITU, 100.0 * math.tanh(0.5) * math.tanh(0.04) * logistic(-2.0)),
        (1e3, -1e6, SITU, -100.0),
    ],
    ids=["oai", "oai_above", "oai_below", "oai_nan", "situ", "situ_negative", "situ_saturated"],
)
def test_the_other_kinds_follow_their_formulas(gate, up, rule, expected):
    # alpha is a float32 number: 1.702 loses its eighth digit.
    assert gated(f64([gate, up]), rule).item() == pytest.approx(expected, rel=1e-6)


def test_alpha_is_a_float32_number():
    exact = 2.0 * logistic(2.0 * 1.7020000219345093)
    assert gated(f64([2.0, 0.0]), OAI).item() == pytest.approx(exact, rel=1e-15)


@pytest.mark.parametrize(
    ("up", "stored"), [(256.0, 256.0), (258.0, 260.0), (2.0**-9, 1.0)], ids=str
)
def test_up_plus_one_is_stored_where_the_recipe_rounds_and_not_in_the_ideal(up, stored):
    row = f64([64.0, up])
    assert gated_as_stored(row, OAI, Stores.NOTHING).item() == 64.0 * stored
    assert gated(row, OAI).item() == 64.0 * (up + 1)


@pytest.mark.parametrize(
    ("stores", "expected"),
    [
        (Stores.NOTHING, silu(1.5) * 1.5),
        (Stores.PRODUCT, 1.8359375),
        (Stores.SILU_AND_PRODUCT, 1.84375),
    ],
)
def test_silu_is_rounded_as_often_as_it_is_stored(stores, expected):
    got = gated_as_stored(f64([1.5, 1.5]), SILU, stores).item()
    assert got == pytest.approx(expected, rel=1e-15)


def test_a_limit_is_a_bf16_number_where_the_recipe_rounds_and_not_in_the_ideal():
    row, rule = f64([20.0, 1.0]), GatedActivation(limit=7.03)
    stored = gated_as_stored(row, rule, Stores.NOTHING).item()
    assert stored == pytest.approx(silu(7.03125), rel=1e-15)
    assert gated(row, rule).item() == pytest.approx(silu(7.03), rel=1e-15)


@pytest.mark.parametrize(
    "rule", [SILU, SILU_10, OAI, OAI_10, SITU], ids=lambda rule: f"{rule.kind}-{rule.limit}"
)
def test_pipeline_and_golden_differ_by_fp32_noise_alone(rule):
    drawn = 8 * torch.randn(64, 128, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    golden = gated_as_stored(drawn.to(torch.float64), rule, Stores.NOTHING)
    got = activate(drawn, rule, ActivationStores.NONE).to(torch.float64)
    assert torch.allclose(got, golden, rtol=1e-5, atol=0.0)
