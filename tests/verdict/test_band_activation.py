"""Bands of the gated activations: fp32 stays within them, another formula does not."""

from functools import partial

import pytest
import torch

from moe.arithmetic import ArithmeticModel
from moe.formats import ActivationKind, GatedActivation
from moe.golden import Stores, gated_as_stored
from reports.verdict.band import FP32_SMALLEST, activation_noise

SILU = GatedActivation()
CLAMPED = GatedActivation(limit=7.0)
OAI = GatedActivation(kind=ActivationKind.OAI_SWIGLU, limit=7.0, alpha=1.702)
SITU = GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)


def drawn():
    """gate and up, [256, 64] fp32 of bf16 values: many small ones, some far out."""
    generator = torch.Generator().manual_seed(5)
    halves = torch.randn(2, 256, 64, generator=generator) * torch.logspace(-2, 1.7, 64)
    return halves.to(torch.bfloat16).to(torch.float32)


def sigmoid_by_exp(x):
    return 1 / (1 + torch.exp(-x))


def tanh_by_sigmoid(x):
    return 2 * torch.sigmoid(2 * x) - 1


def silu(gate, up):
    return gate / (1 + torch.exp(-gate)) * up


def oai_swiglu(gate, up, sigmoid=torch.sigmoid, alpha=1.702, shift=1.0):
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * sigmoid(alpha * gate) * (up + shift).to(torch.bfloat16).to(torch.float32)


def situ(gate, up, tanh=torch.tanh, alpha=4.0, bound=25.0):
    return alpha * tanh(gate / alpha) * torch.sigmoid(gate) * (bound * tanh(up / bound))


BY_TANH = ArithmeticModel()
BY_SIGMOID = ArithmeticModel(tanh_by_sigmoid=True)


def in_its_band(got, gate, up, rule, arithmetic=BY_TANH):
    """[R, I] distances from float64, in bands; a zero in a band of zero is at home."""
    gate_up = torch.cat([gate, up], dim=1).double()
    want = gated_as_stored(gate_up, rule, Stores.NOTHING)
    noise = activation_noise(gate_up, want, rule, arithmetic)
    return ((got.double() - want).abs() / (noise + FP32_SMALLEST)).nan_to_num(nan=0.0)


@pytest.mark.parametrize(
    ("rule", "formula"),
    [
        pytest.param(SILU, silu, id="silu"),
        pytest.param(CLAMPED, lambda g, u: silu(g.clamp(max=7), u.clamp(-7, 7)), id="clamped"),
        pytest.param(OAI, oai_swiglu, id="oai_swiglu"),
        pytest.param(OAI, partial(oai_swiglu, sigmoid=sigmoid_by_exp), id="oai_swiglu by exp"),
        pytest.param(SITU, situ, id="situ"),
    ],
)
def test_an_activation_in_fp32_stays_in_its_band(rule, formula):
    gate, up = drawn()
    assert in_its_band(formula(gate, up), gate, up, rule).max() <= 1


def test_a_tanh_by_sigmoid_stays_in_the_band_of_who_declares_it_and_in_no_other():
    gate, up = drawn()
    product = situ(gate, up, tanh=tanh_by_sigmoid)
    assert in_its_band(product, gate, up, SITU, BY_SIGMOID).max() <= 1
    assert in_its_band(product, gate, up, SITU).max() > 100


@pytest.mark.parametrize(
    ("rule", "roundings"),
    [(SILU, 10.0), (OAI, 12.0 + 1.702), (SITU, 10.0 + 2 * (3 + 4))],
    ids=lambda value: getattr(value, "kind", ""),
)
def test_noise_literals(rule, roundings):
    """Of gate and up 1: roundings of fp32, relative to the product, and next to nothing else."""
    gate_up = torch.ones(1, 2, dtype=torch.float64)
    want = gated_as_stored(gate_up, rule, Stores.NOTHING)
    noise = activation_noise(gate_up, want, rule, BY_TANH)
    assert float(noise / want) == pytest.approx(roundings * 2.0**-24, rel=1e-6)


@pytest.mark.parametrize("up", [3.0, 0.0])
@pytest.mark.parametrize(
    ("rule", "formula"),
    [
        pytest.param(SILU, silu, id="silu"),
        pytest.param(OAI, partial(oai_swiglu, sigmoid=sigmoid_by_exp), id="oai_swiglu"),
        pytest.param(SITU, situ, id="situ"),
    ],
)
def test_an_activation_in_fp32_stays_in_its_band_to_where_exp_overflows(rule, formula, up):
    gate = torch.linspace(-120, 20, 4001).to(torch.bfloat16).to(torch.float32)[:, None]
    up = torch.full_like(gate, up)
    assert in_its_band(formula(gate, up), gate, up, rule).max() <= 1


@pytest.mark.parametrize(
    ("rule", "formula"),
    [
        pytest.param(
            SILU, lambda g, u: g / (1 + torch.exp(-g) * (1 + 2.0**-18)) * u, id="silu, coarse exp"
        ),
        pytest.param(CLAMPED, silu, id="clamp left out"),
        pytest.param(CLAMPED, lambda g, u: silu(g.clamp(-7, 7), u), id="gate clamped below"),
        pytest.param(OAI, silu, id="silu for oai_swiglu"),
        pytest.param(OAI, partial(oai_swiglu, alpha=1.7), id="alpha cut short"),
        pytest.param(OAI, partial(oai_swiglu, shift=0.0), id="up without one"),
        pytest.param(SITU, silu, id="silu for situ"),
        pytest.param(SITU, partial(situ, alpha=25.0, bound=4.0), id="bounds exchanged"),
        pytest.param(SITU, partial(situ, alpha=2.0**20), id="gate not saturated"),
        pytest.param(SITU, partial(situ, bound=2.0**20), id="up not saturated"),
        pytest.param(
            SITU, partial(situ, tanh=lambda x: torch.tanh(x) * (1 + 2.0**-11)), id="coarse tanh"
        ),
    ],
)
def test_another_formula_leaves_the_band(rule, formula):
    gate, up = drawn()
    share = (in_its_band(formula(gate, up), gate, up, rule) > 1).double().mean()
    assert share > 0.05


@pytest.mark.parametrize("rule", [SILU, OAI, SITU], ids=lambda rule: rule.kind)
def test_a_store_as_bf16_leaves_the_band(rule):
    """What is kept in fp32 and what is stored are told apart."""
    gate, up = drawn()
    gate_up = torch.cat([gate, up], dim=1).double()
    stored = gated_as_stored(gate_up, rule, Stores.PRODUCT)
    assert (in_its_band(stored, gate, up, rule) > 1).double().mean() > 0.5
