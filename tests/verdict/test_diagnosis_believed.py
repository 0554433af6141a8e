"""Which of several explanations is believed, and how much."""

import torch

from moe.mistakes import Mistake
from reports.verdict.diagnosis.explanation import Certainty, Explanation, believed


def says(mistake, explains, *, choices=1, is_guess=False):
    return Explanation(
        mistake=mistake,
        words=str(mistake),
        explains=torch.tensor(explains, dtype=torch.bool),
        choices=choices,
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


def test_of_equal_ones_the_one_with_fewer_choices_is_sure():
    found = believed([says(ROWS, ALL, choices=100), says(STALE, ALL)])
    assert (found.mistake, found.certainty) == (STALE, Certainty.HIGH)


def test_rows_count_for_more_than_choices():
    found = believed([says(ROWS, ALL, choices=100), says(STALE, MOST)])
    assert found.mistake == ROWS


def test_looks_alone_are_never_sure():
    assert believed([says(ROWS, ALL, is_guess=True)]).certainty == Certainty.LOW


def test_a_law_of_most_rows_comes_before_looks_of_all():
    assert believed([says(ROWS, ALL, is_guess=True), says(STALE, MOST)]).mistake == STALE
