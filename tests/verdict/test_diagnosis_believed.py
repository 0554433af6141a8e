"""Which of several explanations is believed, and how much."""

import math

import pytest
import torch

from moe.mistakes import Mistake
from reports.verdict.diagnosis.explanation import (
    HYPOTHESES_ASKED,
    ODDS,
    Certainty,
    Explanation,
    believed,
    bits_of_choice,
)
from reports.verdict.diagnosis.hypotheses import HYPOTHESES

ENOUGH = ODDS + HYPOTHESES_ASKED


def says(mistake, explains, *, cost=0.0, evidence=math.inf, is_guess=False):
    return Explanation(
        mistake=mistake,
        words=str(mistake),
        explains=torch.tensor(explains, dtype=torch.bool),
        cost=cost,
        evidence=evidence,
        is_guess=is_guess,
    )


ALL, MOST, HALF = [True] * 4, [True, True, True, False], [True, True, False, False]
ROWS, STALE = Mistake.ROWS_MISPLACED, Mistake.STALE


def test_nothing_is_believed_without_explanations():
    assert believed([]) is None


def test_one_that_explains_every_row_is_sure():
    found = believed([says(ROWS, ALL), says(STALE, HALF)])
    assert (found.mistake, found.certainty) == (ROWS, Certainty.HIGH)


def test_one_that_explains_most_rows_is_a_guess_and_counts_them():
    found = believed([says(ROWS, MOST)])
    assert found.certainty == Certainty.LOW
    assert found.words.endswith("(of 4 wrong rows, 3 are explained)")


def test_half_of_the_rows_are_not_enough():
    assert believed([says(ROWS, HALF)]) is None


def test_no_row_is_explained_by_nothing():
    assert believed([says(ROWS, [])]) is None


def test_two_kinds_that_do_as_well_are_both_named_and_neither_is_sure():
    found = believed([says(ROWS, ALL), says(STALE, ALL)])
    assert found.certainty == Certainty.LOW
    assert found.words == "rows_misplaced; or stale"


def test_two_laws_of_one_kind_do_not_doubt_each_other():
    assert believed([says(ROWS, ALL), says(ROWS, ALL)]).certainty == Certainty.HIGH


@pytest.mark.parametrize(("choices", "sure"), [(100, "low"), (1025, "high")])
def test_of_equal_ones_that_with_a_thousandth_of_the_choices_is_sure(choices, sure):
    found = believed([says(ROWS, ALL, cost=bits_of_choice(choices)), says(STALE, ALL)])
    assert (found.mistake, found.certainty) == (STALE, sure)


def test_choices_that_are_made_row_by_row_multiply():
    assert bits_of_choice(4, times=3) == bits_of_choice(64)
    assert bits_of_choice(1, times=9) == bits_of_choice(0) == 0


@pytest.mark.parametrize(("evidence", "sure"), [(ENOUGH - 0.1, "low"), (ENOUGH, "high")])
def test_what_luck_may_have_hit_is_not_sure(evidence, sure):
    assert believed([says(ROWS, ALL, evidence=evidence)]).certainty == sure
    assert believed([says(ROWS, ALL, evidence=evidence + 3, cost=3)]).certainty == sure


def test_rows_count_for_more_than_choices():
    found = believed([says(ROWS, ALL, cost=7), says(STALE, MOST)])
    assert found.mistake == ROWS


def test_looks_alone_are_never_sure():
    assert believed([says(ROWS, ALL, is_guess=True)]).certainty == Certainty.LOW


def test_a_law_of_most_rows_comes_before_looks_of_all():
    assert believed([says(ROWS, ALL, is_guess=True), says(STALE, MOST)]).mistake == STALE


def test_the_bits_that_tell_one_hypothesis_suffice_for_all_of_them():
    assert len(HYPOTHESES) <= 2**HYPOTHESES_ASKED
