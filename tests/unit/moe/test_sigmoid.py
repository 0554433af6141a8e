"""A value's sigmoid is its own, wherever it stands."""

import pytest
import torch

from moe.sigmoid import sigmoid

VALUES = torch.linspace(-20, 20, 37 * 48).view(37, 48)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 9, 15, 36])
def test_a_row_has_the_same_bits_beside_any_number_of_others(rows):
    assert torch.equal(sigmoid(VALUES[:rows].clone()), sigmoid(VALUES)[:rows])


def test_values_are_those_of_the_formula_within_three_roundings():
    want = torch.sigmoid(VALUES.double())
    assert ((sigmoid(VALUES).double() - want).abs() <= 3 * 2.0**-23 * want).all()


@pytest.mark.parametrize(("x", "value"), [(-200.0, 0.0), (0.0, 0.5), (200.0, 1.0)])
def test_ends_and_middle_are_exact(x, value):
    assert float(sigmoid(torch.tensor(x))) == value
