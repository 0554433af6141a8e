"""Declared errors against counted roundings."""

import pytest

from moe.arithmetic import ArithmeticModel, compounded


@pytest.mark.parametrize(
    ("model", "terms", "roundings"),
    [
        (ArithmeticModel(), 1, 0),
        (ArithmeticModel(), 4096, 4095),
        # A block: 127 sums, the product of the scales, the multiplication; one addition a block.
        (ArithmeticModel(scaled_block=128), 256, 127 + 2 + 2),
        (ArithmeticModel(scaled_block=128), 257, 127 + 2 + 3),
        (ArithmeticModel(scaled_block=128), 64, 63 + 2 + 1),
    ],
    ids=["one-term", "plain", "two-blocks", "edge-block", "short-block"],
)
def test_the_error_of_a_sum_counts_its_roundings(model, terms, roundings):
    expected = roundings * 2.0**-24 / (1 - roundings * 2.0**-24)
    assert model.sum_error(terms) == pytest.approx(expected, rel=1e-12, abs=0)


def test_fewer_accumulator_bits_err_more():
    assert ArithmeticModel(accumulator_bits=14).sum_error(2) == 2.0**-14 / (1 - 2.0**-14)


def test_roundings_compound_to_more_than_their_sum():
    assert compounded(8, 2.0**-4) == 1.0
