"""The gated activation: clamps, NaN, one rounding."""

import pytest
import torch

from moe.activation import silu_and_mul, silu_rounded_and_mul, unrounded_silu_and_mul
from moe.golden import round_bf16

NAN = torch.nan
INF = torch.inf


def activated(gate: float, up: float, limit: float | None) -> float:
    row = torch.tensor([[gate, up]], dtype=torch.bfloat16)
    return silu_and_mul(row, limit).to(torch.float32).item()


def test_the_first_half_of_the_columns_is_the_gate():
    row = torch.tensor([[0.0, 4.0, 1.0, 0.0]], dtype=torch.bfloat16)
    assert silu_and_mul(row, None).tolist() == [[0.0, 0.0]]
    assert silu_and_mul(row.flip(-1), None)[0, 0].item() == 0.0


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
def test_a_known_value(gate, up, expected):
    assert activated(gate, up, None) == expected


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    [(1.5, 1.5, 1.8359375), (0.5, 3.0, 0.93359375), (-1.0, 7.0, -1.8828125)],
    ids=lambda value: str(value),
)
def test_the_product_is_rounded_once(gate, up, expected):
    # Rounding silu(gate) to bf16 first would give the neighbouring value.
    assert activated(gate, up, None) == expected


@pytest.mark.parametrize("limit", [None, 2.0], ids=["open", "clamped"])
def test_values_are_right_to_the_declared_ulps_and_one_rounding(limit):
    drawn = torch.randn(64, 128, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16) * 3
    gate, up = drawn.to(torch.float64).chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    exact = gate * torch.sigmoid(gate) * up
    noise = exact.abs() * 8 * 2.0**-24
    got = silu_and_mul(drawn, limit).to(torch.float64)
    assert bool((got >= round_bf16(exact - noise)).all())
    assert bool((got <= round_bf16(exact + noise)).all())


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
    ids=lambda pair: "{},{}".format(*pair),
)
def test_with_a_limit_of_10_the_first_pair_counts_as_the_second(given, clamped):
    assert activated(*given, 10.0) == activated(*clamped, None)


def test_the_gate_is_not_clamped_from_below():
    assert activated(-12.0, 1.0, 10.0) == activated(-12.0, 1.0, None) != activated(-10.0, 1.0, None)


def test_the_limit_is_a_bf16_value():
    # 10.03 lies between the bf16 values 10 and 10.0625, nearer to 10.
    assert activated(20.0, 1.0, 10.03) == activated(10.0, 1.0, None)


@pytest.mark.parametrize("pair", [(NAN, 1.0), (1.0, NAN)], ids=["gate", "up"])
def test_without_a_limit_nan_stays_nan(pair):
    assert torch.tensor(activated(*pair, None)).isnan()


@pytest.mark.parametrize("limit", [None, 10.0], ids=["open", "clamped"])
def test_the_given_rows_are_not_written_into(limit):
    rows = torch.full((2, 4), 20.0, dtype=torch.bfloat16)
    silu_and_mul(rows, limit)
    assert rows.tolist() == [[20.0] * 4] * 2


def test_no_rows_make_no_rows():
    assert silu_and_mul(torch.zeros(0, 8, dtype=torch.bfloat16), 10.0).shape == (0, 4)


@pytest.mark.parametrize("limit", [None, 2.0], ids=["open", "clamped"])
def test_the_unrounded_product_is_the_rounded_one_before_its_rounding(limit):
    drawn = torch.randn(64, 128, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16) * 3
    wide = unrounded_silu_and_mul(drawn, limit)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.to(torch.bfloat16), silu_and_mul(drawn, limit))
    assert not torch.equal(wide, silu_and_mul(drawn, limit).to(torch.float32))


@pytest.mark.parametrize(
    ("gate", "up", "expected"),
    # In bf16 silu(1.5) is 1.2265625, silu(0.5) is 0.310546875 and silu(-1) is -0.26953125.
    [(1.5, 1.5, 1.84375), (0.5, 3.0, 0.9296875), (-1.0, 7.0, -1.890625)],
    ids=lambda value: str(value),
)
def test_silu_may_be_rounded_before_it_is_multiplied(gate, up, expected):
    row = torch.tensor([[gate, up]], dtype=torch.bfloat16)
    product = silu_rounded_and_mul(row)
    assert (product.dtype, product.item()) == (torch.bfloat16, expected)
