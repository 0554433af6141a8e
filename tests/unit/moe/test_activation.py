"""The gated activations of the pipeline: clamps, NaN, constants, and how often they are rounded."""

import math

import pytest
import torch

from moe.activation import ActivationStores, activate, gated_product
from moe.formats import ActivationKind, GatedActivation
from moe.golden import round_bf16

NAN = torch.nan
INF = torch.inf
SILU = GatedActivation()
OAI = GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.702)
SITU = GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)
NONE, ONCE, TWICE = ActivationStores.NONE, ActivationStores.ONCE, ActivationStores.TWICE


def silu(limit: float | None) -> GatedActivation:
    return GatedActivation(limit=limit)


def oai(limit: float | None) -> GatedActivation:
    return GatedActivation(kind=ActivationKind.OAI_SWIGLU, alpha=1.702, limit=limit)


def pair(gate: float, up: float) -> torch.Tensor:
    return torch.tensor([[gate, up]], dtype=torch.bfloat16)


def product(gate: float, up: float, rule: GatedActivation) -> float:
    """In fp32, without a store."""
    return gated_product(pair(gate, up), rule).item()


def activated(gate: float, up: float, limit: float | None) -> float:
    """silu, stored once."""
    return activate(pair(gate, up), silu(limit), ONCE).to(torch.float32).item()


@pytest.mark.parametrize("rule", [SILU, OAI, SITU], ids=lambda rule: rule.kind)
def test_the_first_half_of_the_columns_is_the_gate(rule):
    row = torch.tensor([[4.0, 100.0, 1.0, 2.0]], dtype=torch.bfloat16)
    assert gated_product(row, rule).tolist() == [
        [product(4.0, 1.0, rule), product(100.0, 2.0, rule)]
    ]


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1.0, 1.0, 0.73046875),
        (2.0, 1.0, 1.7578125),
        (-1.0, 1.0, -0.26953125),
        (10.0, 2.0, 20.0),
        (-100.0, 1.0, 0.0),
        (100.0, -3.0, -300.0),
        (0.0, 7.0, 0.0),
    ],
    ids=lambda value: str(value),
)
def test_a_known_value_of_silu(gate, up, expected):
    assert activated(gate, up, None) == expected


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (1.0, 1.0, 1.6915915),  # sigmoid(1.702) * 2
        (2.0, 1.0, 3.8713172),  # 2 * sigmoid(3.404) * 2
        (-1.0, 3.0, -0.6168169),  # -sigmoid(-1.702) * 4
        (32.0, 0.0, 32.0),
        (-100.0, 5.0, 0.0),
        (3.0, -1.0, 0.0),
    ],
    ids=lambda value: str(value),
)
def test_a_known_value_of_oai_swiglu(gate, up, expected):
    assert product(gate, up, OAI) == pytest.approx(expected, rel=1e-6, abs=1e-30)


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [
        (4.0, 25.0, 56.9593195),  # 4 tanh(1) sigmoid(4) 25 tanh(1); with tan it would be 238
        (-4.0, 25.0, -1.0432463),
        (2.0, -1.0, -1.6272580),  # 4 tanh(0.5) sigmoid(2) * -25 tanh(0.04)
        (1000.0, 1e6, 100.0),
        (1000.0, -1e6, -100.0),
        (-1000.0, 1e6, 0.0),
        (0.0, 3.0, 0.0),
    ],
    ids=lambda value: str(value),
)
def test_a_known_value_of_situ(gate, up, expected):
    assert product(gate, up, SITU) == pytest.approx(expected, rel=1e-6, abs=1e-30)


@pytest.mark.parametrize(
    ("up", "stored"), [(256.0, 256.0), (258.0, 260.0), (2.0**-9, 1.0), (-3.0, -2.0)], ids=str
)
def test_up_plus_one_of_oai_swiglu_is_stored_as_bf16(up, stored):
    # 257 and 259 are ties of bf16, which go to the even neighbour.
    assert product(32.0, up, OAI) == 32.0 * stored


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [(1.5, 1.5, 1.8359375), (0.5, 3.0, 0.93359375), (-1.0, 7.0, -1.8828125)],
    ids=lambda value: str(value),
)
def test_the_product_is_rounded_once(gate, up, expected):
    # Rounding silu(gate) to bf16 first would give the neighbouring value.
    assert activated(gate, up, None) == expected


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    # In bf16 silu(1.5) is 1.2265625, silu(0.5) is 0.310546875 and silu(-1) is -0.26953125.
    [(1.5, 1.5, 1.84375), (0.5, 3.0, 0.9296875), (-1.0, 7.0, -1.890625)],
    ids=lambda value: str(value),
)
def test_silu_may_be_rounded_before_it_is_multiplied(gate, up, expected):
    got = activate(pair(gate, up), SILU, TWICE)
    assert (got.dtype, got.item()) == (torch.bfloat16, expected)


def exact(rule: GatedActivation, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """float64 formulas, clamped already."""
    match rule.kind:
        case ActivationKind.SILU:
            return gate * torch.sigmoid(gate) * up
        case ActivationKind.OAI_SWIGLU:
            return gate * torch.sigmoid(1.702 * gate) * round_bf16(up + 1)
        case ActivationKind.SITU:
            return 4 * (gate / 4).tanh() * torch.sigmoid(gate) * 25 * (up / 25).tanh()


@pytest.mark.parametrize(
    "rule", [SILU, silu(2.0), OAI, oai(2.0), SITU], ids=lambda r: f"{r.kind}-{r.limit}"
)
def test_values_are_right_to_a_few_ulps_and_one_rounding(rule):
    drawn = torch.randn(64, 128, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16) * 3
    gate, up = drawn.to(torch.float64).chunk(2, dim=-1)
    if rule.limit is not None:
        gate, up = gate.clamp(max=rule.limit), up.clamp(-rule.limit, rule.limit)
    expected = exact(rule, gate, up)
    noise = expected.abs() * 16 * 2.0**-24
    got = activate(drawn, rule, ONCE).to(torch.float64)
    assert bool((got >= round_bf16(expected - noise)).all())
    assert bool((got <= round_bf16(expected + noise)).all())


@pytest.mark.parametrize("rule_of", [silu, oai])
@pytest.mark.parametrize(
    ("given", "clamped"),
    [
        ((20.0, 1.0), (10.0, 1.0)),
        ((1.0, 20.0), (1.0, 10.0)),
        ((1.0, -20.0), (1.0, -10.0)),
        ((INF, 1.0), (10.0, 1.0)),
        ((1.0, INF), (1.0, 10.0)),
        ((1.0, -INF), (1.0, -10.0)),
        ((NAN, 1.0), (10.0, 1.0)),
        ((1.0, NAN), (1.0, -10.0)),
    ],
    ids=lambda pair: "{},{}".format(*pair) if isinstance(pair, tuple) else None,
)
def test_with_a_limit_of_10_the_first_pair_counts_as_the_second(given, clamped, rule_of):
    assert product(*given, rule_of(10.0)) == product(*clamped, rule_of(None))


@pytest.mark.parametrize("rule_of", [silu, oai])
def test_the_gate_is_not_clamped_from_below(rule_of):
    low = product(-12.0, 1.0, rule_of(10.0))
    assert low == product(-12.0, 1.0, rule_of(None)) != product(-10.0, 1.0, rule_of(None))


@pytest.mark.parametrize(("limit", "stored"), [(10.03, 10.0), (7.03, 7.03125)], ids=str)
def test_the_limit_is_a_bf16_value(limit, stored):
    assert product(20.0, 1.0, silu(limit)) == product(stored, 1.0, silu(None))
    assert product(1.0, 20.0, silu(limit)) == product(1.0, stored, silu(None))


def test_the_gate_of_oai_swiglu_is_compared_in_fp32_and_its_up_in_bf16():
    limited = gated_product(torch.tensor([[7.03125, 2.0]]).bfloat16(), oai(7.03))
    limit = torch.tensor(7.03)
    assert limited.item() == (limit * torch.sigmoid(1.702 * limit) * 3.0).item()
    assert product(1.0, 20.0, oai(7.03)) == product(1.0, 7.03125, oai(None))


@pytest.mark.parametrize("given", [(NAN, 1.0), (1.0, NAN)], ids=["gate", "up"])
@pytest.mark.parametrize("rule", [SILU, OAI, SITU], ids=lambda rule: rule.kind)
def test_without_a_limit_nan_stays_nan(given, rule):
    assert math.isnan(product(*given, rule))


@pytest.mark.parametrize(
    "rule", [SILU, silu(10.0), OAI, oai(10.0), SITU], ids=lambda r: f"{r.kind}-{r.limit}"
)
@pytest.mark.parametrize("stores", [NONE, ONCE])
def test_the_given_rows_are_not_written_into(rule, stores):
    rows = torch.full((2, 4), 20.0, dtype=torch.bfloat16)
    activate(rows, rule, stores)
    assert rows.tolist() == [[20.0] * 4] * 2


@pytest.mark.parametrize("rule", [silu(10.0), OAI, SITU], ids=lambda rule: rule.kind)
def test_no_rows_make_no_rows(rule):
    assert activate(torch.zeros(0, 8, dtype=torch.bfloat16), rule, ONCE).shape == (0, 4)


@pytest.mark.parametrize(
    "rule", [SILU, silu(2.0), OAI, oai(2.0), SITU], ids=lambda r: f"{r.kind}-{r.limit}"
)
def test_what_is_stored_once_is_the_fp32_product_rounded(rule):
    drawn = torch.randn(64, 128, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16) * 3
    wide, stored = activate(drawn, rule, NONE), activate(drawn, rule, ONCE)
    assert (wide.dtype, stored.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(wide.to(torch.bfloat16), stored)
    assert not torch.equal(wide, stored.to(torch.float32))
