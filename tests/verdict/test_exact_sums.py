"""Which sums have one answer, by hand-written numbers."""

import math

import pytest
import torch

from moe.formats import Stage
from reports.verdict.exact_sums import Conditions, low_bit


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("value", "divides"),
    [(1.0, 1.0), (-6.0, 2.0), (0.75, 0.25), (96.0, 32.0), (0.0, math.inf), (2.0**-40, 2.0**-40)],
)
def test_the_low_bit_is_the_largest_power_of_two_that_divides(value, divides):
    assert low_bit(f64(value)).item() == divides


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nothing_divides_what_is_no_number(value):
    assert low_bit(f64(value)).item() == 0.0


def test_a_sum_fits_up_to_two_to_the_bits_quanta():
    conditions = Conditions()
    holds = conditions.sums(
        Stage.COMBINE, "sums", 8, quantum=f64(1, 1, 0.5, 0), magnitude=f64(256, 257, 128.5, 1)
    )
    assert holds.tolist() == [True, False, False, False]


def test_a_sum_of_zeros_fits():
    holds = Conditions().sums(Stage.COMBINE, "sums", 8, quantum=f64(math.inf), magnitude=f64(0.0))
    assert holds.tolist() == [True]


def test_the_worst_cell_of_all_calls_is_kept():
    conditions = Conditions()
    for quantum, magnitude in ((1.0, 5.0), (0.25, 8.0), (1.0, 12.0)):
        conditions.sums(Stage.GEMM1, "sums", 24, quantum=f64(quantum), magnitude=f64(magnitude))
    (worst,) = conditions.reductions.values()
    assert (worst.quantum, worst.largest, worst.cells, worst.certain) == (0.25, 8.0, 3, 3)


def test_the_condition_that_fewest_cells_fulfil_is_named():
    conditions = Conditions()
    conditions.require("often", torch.tensor([True, True, False]))
    conditions.require("seldom", torch.tensor([True, False, False]))
    name, share = conditions.least()
    assert (name, round(share, 3)) == ("seldom", 0.333)
