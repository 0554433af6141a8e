"""Packed words as numbers: hand-packed bytes, with the highest bit as a digit or as a sign."""

import pytest
import torch

from reports.verdict.diagnosis.words import (
    bytes_of,
    exponents,
    in_fours,
    scales_of,
    unsigned,
    words_of,
)

BYTES = torch.tensor([[1, 2, 3, 128, 5]])
WORDS = torch.tensor([[0x80030201, 0x00000005]])
SIGNED = torch.tensor([[0x80030201 - 2**32, 5]])


def test_the_lowest_byte_is_the_first_group():
    assert torch.equal(words_of(BYTES), WORDS)
    assert bytes_of(WORDS).tolist() == [[1, 2, 3, 128, 5, 0, 0, 0]]


@pytest.mark.parametrize("words", [WORDS, SIGNED, SIGNED.to(torch.int32)])
def test_scales_are_read_from_words_with_a_sign_or_without(words):
    due = [[2.0**-126, 2.0**-125, 2.0**-124, 2.0, 2.0**-122]]
    assert scales_of(words, 5).tolist() == due


def test_a_sign_is_the_highest_digit():
    assert torch.equal(unsigned(SIGNED), WORDS)
    assert torch.equal(unsigned(SIGNED.double()), WORDS.double())


def test_a_row_is_filled_up_to_whole_words():
    assert in_fours(BYTES).tolist() == [[[1, 2, 3, 128], [5, 0, 0, 0]]]


def test_no_row_is_filled_up_to_no_words():
    assert in_fours(BYTES[:0]).shape == (0, 2, 4)


def test_a_scale_that_is_none_has_its_own_byte():
    scale = torch.tensor([[2.0**-127, 1.0, torch.nan]], dtype=torch.float64)
    assert exponents(scale).tolist() == [[0, 127, 255]]
