"""Activations by another formula: each is told from the others, and from a gain."""

import pytest
import torch

from moe.formats import ActivationKind, GatedActivation
from moe.golden import gated
from reports.verdict.diagnosis.formulas import formulas_but

LIMITED = GatedActivation(limit=10.0)
OAI = GatedActivation(kind=ActivationKind.OAI_SWIGLU, limit=7.0, alpha=1.702)
SITU = GatedActivation(kind=ActivationKind.SITU, alpha=4.0, linear_limit=25.0)
PLAIN = GatedActivation()

RULES = {"silu": PLAIN, "limited": LIMITED, "oai": OAI, "situ": SITU}
EVERY_RULE = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


@pytest.fixture(scope="module")
def gate_up():
    generator = torch.Generator().manual_seed(0)
    rows = 8.0 * torch.randn(6, 256, generator=generator)
    return rows.to(torch.bfloat16).double()


@EVERY_RULE
def test_no_other_formula_is_what_is_due(rule, gate_up):
    due = gated(gate_up, rule)
    for other in formulas_but(rule):
        value, _ = other.formula(gate_up)
        assert ((value - due).abs() > 0.01 * due.abs()).any(1).all(), other.words


@EVERY_RULE
def test_formulas_of_other_words_give_other_values(rule, gate_up):
    by_words = {}
    for other in formulas_but(rule):
        by_words.setdefault(other.words, other.formula(gate_up)[0])
    values = list(by_words.items())
    for number, (words, value) in enumerate(values):
        for other_words, other in values[number + 1 :]:
            assert not torch.allclose(value, other), (words, other_words)


def value_of(rule, words, gate_up):
    (first, *_) = [one for one in formulas_but(rule) if words in one.words]
    return first.formula(gate_up)[0][0, 0]


PAIR = torch.tensor([[12.0, -20.0]], dtype=torch.float64)
"""A gate of 12 and an up of -20."""


@pytest.mark.parametrize(
    ("rule", "words", "value"),
    [
        (LIMITED, "not clamped at 10", -239.9985),  # 12 / (1 + exp(-12)) * -20
        (LIMITED, "product clamped at 10", -10.0),
        (LIMITED, "up not clamped, gate is", -199.9909),  # 10 / (1 + exp(-10)) * -20
        (LIMITED, "gate not clamped, up is", -119.9993),  # 12 / (1 + exp(-12)) * -10
        (LIMITED, "exchanged", -4.1223e-07),  # -20 / (1 + exp(20)) * 10
        (OAI, "silu(gate) * up", -239.9985),
        (OAI, "1 that belongs to up is missing", -49.0),  # gate 7, up -7
        (OAI, "alpha missing", -41.9617),  # 7 / (1 + exp(-7)) * (-7 + 1)
    ],
)
def test_a_formula_gives_what_its_words_say(rule, words, value):
    assert value_of(rule, words, PAIR) == pytest.approx(value, rel=2e-3)
