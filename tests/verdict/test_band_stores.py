"""A stored value is what the golden's rounds to, or next to a boundary: bf16 as a step function."""

import pytest
import torch

from reports.verdict.band import stored_bf16
from reports.verdict.ledger import error_over_band
from reports.verdict.stores import STORES, could_be_stored, step_of
from tests.verdict.stored_cells import DECLARED, drawn, judged, to_nearest, towards_zero


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize(
    ("got", "want", "noise", "legal"),
    [
        (1.0, 1.0, 0.0, True),
        (1.0078125, 1.0, 0.0, False),
        (1.0, 1.00390625, 0.0, True),
        (1.0078125, 1.00390625, 0.0, False),
        (1.0078125, 1.00390625, 1e-9, True),
        (1.0078125, 1.0039, 1e-6, False),
        (1.0078125, 1.0039, 1e-5, True),
        (-1.0078125, -1.00390625, 1e-9, True),
        (2.0**-133, 0.0, 0.0, True),
        (5.0, 1.0, float("inf"), True),
    ],
    ids=[
        "itself",
        "one place off",
        "a tie to even",
        "a tie to odd",
        "a tie with noise",
        "further from the boundary than its noise",
        "nearer than its noise",
        "negative",
        "the smallest number",
        "no bound",
    ],
)
def test_what_may_be_stored(got, want, noise, legal):
    assert could_be_stored(f64(got), f64(want), f64(noise)).item() is legal


@pytest.mark.parametrize("seed", range(3))
def test_every_value_within_the_noise_is_stored_as_one_that_may_be(seed):
    want = drawn(seed)
    noise = DECLARED * want.abs()
    for share in (-0.999, -0.5, 0.0, 0.5, 0.999):
        assert could_be_stored(to_nearest(want + share * noise), want, noise).all()


@pytest.mark.parametrize(
    ("value", "step"), [(1.0, 2.0**-7), (1.99, 2.0**-7), (2.0, 2.0**-6), (-0.75, 2.0**-8)]
)
def test_the_step_is_from_one_stored_value_to_the_next(value, step):
    assert step_of(f64(value)).item() == step


def test_a_run_within_its_noise_breaks_no_rule():
    assert judged(seed=0).deviations == []


def test_a_store_towards_zero_is_found_in_cells_that_the_band_lets_pass():
    want = drawn(0)
    band = stored_bf16(want, DECLARED * want.abs())

    def store(values):
        passes = error_over_band(towards_zero(values), want, band) <= 1
        return torch.where(passes, towards_zero(values), to_nearest(values))

    found = judged(seed=0, store=store).deviations
    assert {one.check for one in found} == {STORES}


def test_a_gain_of_one_thousandth_is_found_in_cells_that_the_band_lets_pass():
    wide = 1.8 + 0.19 * drawn(0).tanh()  # a band of 0.8 steps: half of one, and a gain of 0.26
    found = judged(seed=0, mistake=lambda values: values * 1.001, want=wide).deviations
    assert {one.check for one in found} == {STORES}


def test_a_cell_outside_the_band_is_reported_once():
    def one_cell(values):
        values[5, 7] *= 1.5
        return values

    (found,) = judged(seed=0, mistake=one_cell).deviations
    assert (found.check, found.token) == ("band", 5)


def test_a_cell_that_is_no_number_is_reported_once():
    def one_cell(values):
        values[5, 7] = torch.nan
        return values

    (found,) = judged(seed=0, mistake=one_cell).deviations
    assert (found.check, found.token) == ("band", 5)


@pytest.mark.parametrize("want", [float("nan"), float("inf")])
def test_what_the_golden_has_as_no_finite_number_has_no_steps(want):
    cells = torch.full((3, 512), want, dtype=torch.float64)
    assert judged(seed=0, want=cells).deviations == []


def test_a_rank_that_left_its_band_is_not_asked_for_its_stores():
    def mistake(values):
        values = values * 1.001
        values[5, 7] *= 1.5
        return values

    wide = 1.8 + 0.19 * drawn(0).tanh()
    found = judged(seed=0, mistake=mistake, want=wide).deviations
    assert {(one.rank, one.check) for one in found} == {
        (0, STORES),
        (1, "band"),  # row 5 of ranks in turn
        (2, STORES),
        (3, STORES),
    }
